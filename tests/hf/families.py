"""All model families by name."""

from __future__ import annotations

from decoder_models import DECODERS, EXPERTS, RECURRENT
from encoder_models import ENCODERS, SEQUENCE_TO_SEQUENCE
from multimodal_models import MIXED
from vision_audio_models import SPEECH, VISION

FAMILIES = {**DECODERS, **EXPERTS, **RECURRENT, **ENCODERS, **SEQUENCE_TO_SEQUENCE, **VISION, **SPEECH, **MIXED}
