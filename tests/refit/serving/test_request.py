"""Parsing of completion requests: total, strict, and it names what is wrong."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.errors import BadRequestError
from paceline.refit.generators.protocol import Sampling
from paceline.refit.serving.request import CompletionRequest, parse_completion_request

LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
JSON = LEAF | st.lists(LEAF, max_size=3) | st.lists(st.lists(LEAF, max_size=2), max_size=2)
FIELDS = st.sampled_from(
    [
        "model",
        "prompt",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "n",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "echo",
        "stream",
        "best_of",
        "logit_bias",
        "x",
    ]
)


def parse(**fields: object) -> CompletionRequest:
    return parse_completion_request(json.dumps({"prompt": "a", **fields}).encode())


@given(
    body=st.binary(max_size=40)
    | st.dictionaries(FIELDS, JSON, max_size=4).map(lambda d: json.dumps(d).encode())
)
def test_total(body: bytes) -> None:
    """Whatever arrives is a request or an error that names a field."""
    try:
        request = parse_completion_request(body)
    except BadRequestError as exc:
        assert exc.field  # noqa: PT017 - both outcomes are fine, the error's content matters
    else:
        assert request.prompts


def test_all_fields() -> None:
    """Every field arrives where it belongs."""
    request = parse(
        model="m",
        prompt=[1, 2],
        max_tokens=3,
        temperature=0,
        top_p=0.5,
        top_k=4,
        n=2,
        seed=5,
        stop="x",
        stop_token_ids=[6],
        ignore_eos=True,
        logprobs=0,
        echo=False,
        stream=None,
        user="somebody",
    )
    assert (request.model, request.prompts, request.wants_logprobs) == ("m", ((1, 2),), True)
    assert request.sampling == Sampling(
        max_tokens=3,
        temperature=0,
        top_p=0.5,
        top_k=4,
        n=2,
        seed=5,
        stop=("x",),
        stop_token_ids=(6,),
        ignore_eos=True,
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ("ab",)),
        ([1, 2], ((1, 2),)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ([[1], "b"], ((1,), "b")),
        ([[]], ((),)),
    ],
)
def test_prompt_shapes(prompt: object, prompts: tuple[object, ...]) -> None:
    """A text, tokens, and lists of either are prompts."""
    assert parse(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": True}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": 1e-39}, "temperature"),
        ({"prompt": "\ud800"}, "body"),
        ({"\ud800": 1}, "body"),
        ({"stop": [1]}, "stop"),
        ({"echo": True}, "echo"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"chunk": 1}}, "stream_options"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 5}, "logprobs"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"tempo": 1}, "tempo"),
    ],
)
def test_refusals(fields: dict[str, object], field: str) -> None:
    """What is wrong is named."""
    with pytest.raises(BadRequestError) as caught:
        parse(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"[" * 100_000, b'"x"'])
def test_not_an_object(body: bytes) -> None:
    """A body that is no JSON object is refused, however deep."""
    with pytest.raises(BadRequestError, match="body"):
        parse_completion_request(body)
