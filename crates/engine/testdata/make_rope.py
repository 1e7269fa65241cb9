"""Makes rope.json: frequencies of transformers' rotary embeddings for several scalings.

    pip install torch==2.13.0 transformers==5.23.0
    python make_rope.py > rope.json
"""
import json, os
os.environ['TRANSFORMERS_VERBOSITY']='error'
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
base = dict(hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=131072, num_hidden_layers=1, num_key_value_heads=4, intermediate_size=16, vocab_size=16)
cases = {
 'default': dict(rope_theta=500000.0),
 'linear': dict(rope_theta=10000.0, rope_scaling=dict(type='linear', factor=8.0)),
 'llama3': dict(rope_theta=500000.0, rope_scaling=dict(rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)),
 'yarn': dict(rope_theta=1000000.0, rope_scaling=dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=32768)),
 'yarn mscale': dict(rope_theta=10000.0, rope_scaling=dict(rope_type='yarn', factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.707, beta_fast=32, beta_slow=1)),
 'yarn untruncated': dict(rope_theta=150000.0, rope_scaling=dict(rope_type='yarn', factor=32.0, original_max_position_embeddings=4096, truncate=False, beta_fast=32.0, beta_slow=1.0)),
 'yarn partial, given factor': dict(rope_theta=10000.0, rope_scaling=dict(rope_type='yarn', factor=16.0, original_max_position_embeddings=8192, attention_factor=1.25, partial_rotary_factor=0.5)),
}
out = []
for name, fields in cases.items():
    r = LlamaRotaryEmbedding(LlamaConfig(**base, **json.loads(json.dumps(fields))))
    out.append(dict(name=name, config=dict(model_type='llama', **base, **fields), inv_freq=[float(x) for x in r.inv_freq], attention_factor=float(r.attention_scaling)))
print(json.dumps(out, indent=None).replace('}, {"name"', '},\n{"name"'))
