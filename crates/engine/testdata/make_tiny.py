"""Makes tiny/FAMILY: small random models with the logits that transformers computes for them in f32.

    pip install torch==2.13.0 transformers==5.23.0 safetensors
    python make_tiny.py

`golden.safetensors` holds input_ids [1, 48], logits_full (one pass) and logits_prefill32_then_decode
(32 tokens at once, then one by one with transformers' cache), both [1, 48, 256].
"""

import pathlib

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

VOCAB = 256
BASE = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    tie_word_embeddings=False, initializer_range=0.2,
)
FAMILIES = {
    "llama": dict(num_hidden_layers=3, head_dim=16),
    "mistral": dict(num_hidden_layers=3, head_dim=16, sliding_window=16),
    "ministral": dict(num_hidden_layers=4, head_dim=16, sliding_window=16,
                      layer_types=["full_attention"] + ["sliding_attention"] * 3),
    "phi3": dict(num_hidden_layers=3, sliding_window=None),
    "qwen2": dict(num_hidden_layers=3),
    "qwen3": dict(num_hidden_layers=3, head_dim=16),
    "gemma2": dict(num_hidden_layers=4, head_dim=16, sliding_window=16, query_pre_attn_scalar=16),
    "gemma3_text": dict(num_hidden_layers=6, head_dim=16, sliding_window=16, query_pre_attn_scalar=16),
}

ids = torch.randint(3, VOCAB, (1, 48), generator=torch.Generator().manual_seed(7))
for family, fields in FAMILIES.items():
    config = CONFIG_MAPPING[family](**{**BASE, **fields})
    config.dtype = "float32"
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval().float()
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):  # zero in a fresh model
            torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        step = model(ids[:, :32], use_cache=True)
        logits = [step.logits]
        for i in range(32, 48):
            step = model(ids[:, i:i + 1], past_key_values=step.past_key_values, use_cache=True,
                         position_ids=torch.tensor([[i]]))
            logits.append(step.logits)
    folder = pathlib.Path("tiny") / family
    model.save_pretrained(folder)
    save_file({"input_ids": ids.int(), "logits_full": full.contiguous(),
               "logits_prefill32_then_decode": torch.cat(logits, 1).contiguous()},
              folder / "golden.safetensors")
