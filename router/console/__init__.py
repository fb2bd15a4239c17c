"""Holds the console: a page on which people talk with the model, see where the time of each request went and why the
router sent it where it did, and see what every member does.

`page/` has its files, which a browser runs as they are: no step builds them, and they load nothing from another host.
`console_files` reads them, and adds the words and colours that the other pages and the commands use too
(`span_colours`, `router.observe.record_words`). `router.edge` serves them. The page knows the cluster by its HTTP API
alone, and the folder knows nothing of the service behind that.
"""

from router.console.console_files import ConsoleFile, read_console
from router.console.span_colours import OTHER_COLOUR, SPAN_TO_COLOUR

__all__ = ["OTHER_COLOUR", "SPAN_TO_COLOUR", "ConsoleFile", "read_console"]
