"""Turns the last hidden states of a step into tokens.

`step_sampling` does it for a whole step: logits, constraints, draws, accepted drafts and log-probabilities.
`distributions` changes the logits of single rows and draws from them. `grammar` compiles the grammars of structured
outputs into guides, which say which tokens may come next. `prompt_rows` reads what requests want of their prompts.

The runner calls `rows_to_finish` before the forward pass, and `sample_step` and `read_prompts` after it; the talker
draws its codes with `sample_tokens`; the service compiles grammars before it hands a request to the engine. This
package knows nothing of KV pages, features and queues.
"""

from llm_workers.sampling.distributions import sample_tokens
from llm_workers.sampling.grammar import GrammarCompiler
from llm_workers.sampling.prompt_rows import needs_all_rows, read_prompts
from llm_workers.sampling.step_sampling import rows_to_finish, sample_step

__all__ = [
    "GrammarCompiler",
    "needs_all_rows",
    "read_prompts",
    "rows_to_finish",
    "sample_step",
    "sample_tokens",
]
