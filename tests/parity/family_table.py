"""The table of model families: one row each, and `test_families.py` holds every row to the same suite.

A new family adds a file `family_rows_*.py` with its row, and its line here.
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
