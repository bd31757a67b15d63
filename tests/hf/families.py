"""All families, by name."""

from __future__ import annotations

from decoders import DECODERS, EXPERTS, RECURRENT
from encoders import ENCODERS, SEQUENCE_TO_SEQUENCE
from mixed import MIXED
from senses import SPEECH, VISION

FAMILIES = {**DECODERS, **EXPERTS, **RECURRENT, **ENCODERS, **SEQUENCE_TO_SEQUENCE, **VISION, **SPEECH, **MIXED}
