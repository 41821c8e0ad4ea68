"""The factories of ``form_models.py``, with the libraries imported here."""

import diffusers  # noqa: F401
import transformers.masking_utils
import transformers.models.llama.modeling_llama
import transformers.models.mistral.modeling_mistral
import transformers.models.mixtral.modeling_mixtral
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401
from form_models import *  # noqa: F403
