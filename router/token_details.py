"""Provides what a client may ask for besides the text: token ids and log-probabilities, each given out once per choice.
It knows nothing of HTTP.
"""

from __future__ import annotations

from router.api.logprobs import TokenBytes, logprobs_object
from router.api.request import ChatRequest
from router.streams import RequestStream


class TokenDetails:
    """A `TokenDetails` serves one answer, streamed or whole. It gives nothing if the client asked for nothing."""

    def __init__(self, stream: RequestStream, chat: ChatRequest, bytes_of: TokenBytes) -> None:
        self._stream = stream
        self._choices = stream.choices
        self._has_ids = bool(chat.return_token_ids)
        self._has_logprobs = bool(chat.logprobs)
        self._bytes_of = bytes_of
        self._num_returned = [0] * len(stream.choices)

    @property
    def prompt_token_ids(self) -> tuple[int, ...] | None:
        """Returns the prompt's token ids if the client asked for them. They are final once the stream is started;
        before that, the prompt may be made again."""
        return self._stream.prompt_token_ids if self._has_ids else None

    def fresh(self, choice: int) -> dict[str, object]:
        """Returns the fields of a choice for the tokens that no earlier call has returned, and marks those tokens as
        returned."""
        if not self._has_ids and not self._has_logprobs:
            return {}
        output, start = self._choices[choice], self._num_returned[choice]
        token_ids = output.emitted_from(start)
        self._num_returned[choice] += len(token_ids)
        fields: dict[str, object] = {"token_ids": token_ids} if self._has_ids else {}
        if self._has_logprobs and (token_ids or not start):
            fields["logprobs"] = logprobs_object(output.scored_from(start), self._bytes_of)
        return fields
