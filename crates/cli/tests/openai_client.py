"""Drives `turboquant serve` with the official `openai` client.

    pip install openai
    turboquant serve -m smollm2 --port 8000
    python openai_client.py http://127.0.0.1:8000 smollm2

Exits with an assertion error at the first thing that is not as the client's users expect it.
"""

import asyncio
import json
import sys

import openai

base, model = sys.argv[1], sys.argv[2]
client = openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0, timeout=120)
question = [{"role": "user", "content": "What is the capital of France?"}]
greedy = dict(model=model, temperature=0)


def models():
    listed = client.models.list().data
    assert [m.id for m in listed] == [model], listed
    assert client.models.retrieve(model).id == model


def chat():
    whole = client.chat.completions.create(messages=question, max_tokens=32, **greedy)
    choice = whole.choices[0]
    assert "Paris" in choice.message.content, choice
    assert choice.message.role == "assistant" and choice.finish_reason == "stop", choice
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    assert usage.prompt_tokens == 37, usage  # as transformers counts it

    chunks = list(client.chat.completions.create(
        messages=question, max_tokens=32, stream=True, stream_options={"include_usage": True}, **greedy))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content, text
    assert chunks[-1].choices == [] and chunks[-1].usage == usage, chunks[-1]
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "stop"
    assert len({c.id for c in chunks}) == 1

    no_usage = list(client.chat.completions.create(messages=question, max_tokens=4, stream=True, **greedy))
    assert all(c.choices and c.usage is None for c in no_usage)


def options():
    cut = client.chat.completions.create(messages=question, max_tokens=32, stop=[" Paris"], **greedy)
    assert "Paris" not in cut.choices[0].message.content and cut.choices[0].finish_reason == "stop", cut
    short = client.chat.completions.create(messages=question, max_completion_tokens=3, **greedy)
    assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 3, short

    sampled = dict(model=model, messages=question, max_tokens=12, temperature=1.0, seed=5, n=3)
    first, again = (client.chat.completions.create(**sampled) for _ in range(2))
    texts = [c.message.content for c in first.choices]
    assert texts == [c.message.content for c in again.choices], (first, again)
    assert [c.index for c in first.choices] == [0, 1, 2] and len(set(texts)) > 1, texts

    scored = client.chat.completions.create(
        messages=question, max_tokens=8, logprobs=True, top_logprobs=4, **greedy)
    content = scored.choices[0].logprobs.content
    raw = b"".join(bytes(t.bytes) for t in content)
    assert raw.decode() == scored.choices[0].message.content, raw
    for token in content:
        assert len(token.top_logprobs) == 4 and token.top_logprobs[0].logprob == token.logprob, token


def completions():
    prompt = "The capital of France is"
    whole = client.completions.create(prompt=prompt, max_tokens=8, logprobs=2, **greedy)
    choice = whole.choices[0]
    assert "Paris" in choice.text and len(choice.logprobs.tokens) == whole.usage.completion_tokens, whole
    stream = client.completions.create(prompt=prompt, max_tokens=8, stream=True, **greedy)
    assert "".join(c.choices[0].text for c in stream) == choice.text
    both = client.completions.create(prompt=[prompt, "One, two, three,"], max_tokens=8, **greedy)
    assert both.choices[0].text == choice.text and [c.index for c in both.choices] == [0, 1], both


def refusals():
    def refused(kind, code, call):
        try:
            call()
        except kind as error:
            assert error.code == code, error
        else:
            raise AssertionError(f"nothing was refused: {code}")

    refused(openai.NotFoundError, "model_not_found",
            lambda: client.chat.completions.create(model="gpt-4o", messages=question))
    long = [{"role": "user", "content": "the quick brown fox " * 20000}]
    for stream in (False, True):
        refused(openai.BadRequestError, "context_length_exceeded",
                lambda: client.chat.completions.create(model=model, messages=long, stream=stream))
    refused(openai.BadRequestError, None,
            lambda: client.chat.completions.create(messages=[], **greedy))


async def many_clients():
    cities = ["Paris", "London", "Rome", "Madrid", "Berlin", "Vienna", "Athens", "Lisbon"]
    requests = [
        dict(messages=[{"role": "user", "content": f"Write one sentence about {city}."}], max_tokens=24,
             model=model, seed=i, temperature=(i % 2) * 0.8)
        for i, city in enumerate(cities)
    ]
    alone = [client.chat.completions.create(**r).choices[0].message.content for r in requests]
    async with openai.AsyncOpenAI(base_url=base + "/v1", api_key="none", max_retries=0) as many:
        async def streamed(request):
            chunks = await many.chat.completions.create(stream=True, **request)
            return "".join([c.choices[0].delta.content or "" async for c in chunks])
        together = await asyncio.gather(*(streamed(r) for r in requests))
    assert list(together) == alone, json.dumps([together, alone], indent=1)


for check in (models, chat, options, completions, refusals):
    check()
    print(check.__name__, "ok")
asyncio.run(many_clients())
print("many_clients ok")
