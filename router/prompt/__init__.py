"""Makes prompts from requests, and makes them again without what could not be encoded.

`prompt_builder` checks, renders, tokenises and hashes a request, in the threads of `request_threads`, `url_media` has
media fetched that the request names by URL, `named_media` keeps media that have a name, `given_features` reads features
that clients send, `request_media` reads the headers of its media and plans them as items that fit the context,
`generation_options` derives how tokens are drawn, when generation ends and what the output must match, `grammar_checks`
compiles that once as workers do, `speech_options` reads how the answer is spoken, `request_scope` whose caches the
request may share, and `answer_formats` decides how calls of tools and reasoning are written and read.
The router service holds one `PromptBuilder`; a request's run sends the parts of a `Prompt` to members, and its
degradation policy names what to leave out (`ItemKey`, `Losses`). The folder decodes no media, and knows nothing of
workers, encoders or routes.
"""

from router.prompt.answer_formats import PLAIN, AnswerPlan, new_call_id
from router.prompt.prompt_builder import Draft, Prompt, PromptBuilder, PromptRequest, check_not_empty
from router.prompt.request_media import NOTHING_LOST, ItemKey, Losses, MediumFile, media_seconds
from router.prompt.request_scope import salted, wanted_policy
from router.prompt.speech_options import SpeechOptions

__all__ = [
    "NOTHING_LOST",
    "PLAIN",
    "AnswerPlan",
    "Draft",
    "ItemKey",
    "Losses",
    "MediumFile",
    "Prompt",
    "PromptBuilder",
    "PromptRequest",
    "SpeechOptions",
    "check_not_empty",
    "media_seconds",
    "new_call_id",
    "salted",
    "wanted_policy",
]
