"""What a client may ask for beside the text: token ids and log-probabilities, each given out once per choice."""

from __future__ import annotations

from router.api.logprobs import TokenBytes, logprobs_object
from router.api.request import ChatRequest
from router.streams import RequestStream


class TokenDetails:
    """Of one answer, streamed or whole. Empty where nothing was asked for."""

    def __init__(self, stream: RequestStream, chat: ChatRequest, bytes_of: TokenBytes) -> None:
        self._stream = stream
        self._choices = stream.choices
        self._has_ids = bool(chat.return_token_ids)
        self._has_logprobs = bool(chat.logprobs)
        self._bytes_of = bytes_of
        self._num_told = [0] * len(stream.choices)

    @property
    def prompt_token_ids(self) -> tuple[int, ...] | None:
        """Final once the stream is started: a prompt may be made again before."""
        return self._stream.prompt_token_ids if self._has_ids else None

    def fresh(self, choice: int) -> dict[str, object]:
        """Fields of a choice for the tokens that no call has given yet. Remembers them as given."""
        if not self._has_ids and not self._has_logprobs:
            return {}
        output, start = self._choices[choice], self._num_told[choice]
        token_ids = output.emitted_from(start)
        self._num_told[choice] += len(token_ids)
        fields: dict[str, object] = {"token_ids": token_ids} if self._has_ids else {}
        if self._has_logprobs and (token_ids or not start):
            fields["logprobs"] = logprobs_object(output.scored_from(start), self._bytes_of)
        return fields
