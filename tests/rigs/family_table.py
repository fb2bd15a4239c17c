"""Lists the model families, one row each. `test_families.py` runs the same suite on every row.

A new family adds a file `family_rows_*.py` with its row, and its line in this file.
"""

from __future__ import annotations

from family_row import FamilyRow
from family_rows_audio import QWEN2_AUDIO
from family_rows_pictures import INTERNVL, LLAVA, LLAVA_ONEVISION
from family_rows_qwen3_omni import QWEN3_OMNI
from family_rows_qwen_vl import QWEN2_5_OMNI, QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from family_rows_text import LLAMA, QWEN2, QWEN3

ROWS: tuple[FamilyRow, ...] = (
    LLAMA,
    QWEN2,
    QWEN3,
    LLAVA,
    LLAVA_ONEVISION,
    INTERNVL,
    QWEN2_VL,
    QWEN2_5_VL,
    QWEN3_VL,
    QWEN2_AUDIO,
    QWEN2_5_OMNI,
    QWEN3_OMNI,
)
