"""The grammar of addresses: parse and print are inverse, matching is by names, messages say where reading stopped."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gaff
from gaff import Site, SiteError
from gaff.address.grammar import ANY_DEPTH, PORTS, Name, Pattern, nearest, parse, parse_site

plain = st.text("abcXYZ019_-", min_size=1, max_size=6)
odd = st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1, max_size=6)
names = st.one_of(plain, odd)
keys = st.lists(st.one_of(st.integers(-9, 99), st.text(max_size=6)), max_size=3).map(tuple)
ops = st.one_of(st.none(), st.sampled_from(["add", "relu", "__getitem__", "scaled_dot_product_attention"]))
numbers = st.one_of(st.none(), st.integers(0, 999))


@st.composite
def sites(draw):
    op = draw(ops)
    return Site(
        ".".join(draw(st.lists(names, max_size=4))),
        op,
        draw(numbers) if op else None,
        draw(numbers),
        draw(st.sampled_from(PORTS)),
        draw(keys),
    )


globs = st.sampled_from(["*", "?", "conv?", "h*", "*_proj", "a?b*"]).map(lambda text: Name(text, is_glob=True))
parts = st.one_of(names.map(lambda text: Name(text, is_glob=False)), globs, st.just(ANY_DEPTH))


@st.composite
def patterns(draw):
    op = draw(ops)
    return Pattern(
        (draw(st.one_of(globs, st.just(ANY_DEPTH))), *draw(st.lists(parts, max_size=3))),
        draw(st.one_of(st.none(), st.sampled_from(["Conv2d", "Linear", "T5LayerNorm"]))),
        op,
        draw(numbers) if op else None,
        draw(numbers),
        draw(st.sampled_from(PORTS)),
        draw(keys),
    )


@given(sites())
def test_a_printed_site_parses_back_to_itself(site):
    assert parse(str(site)) == site


@given(patterns())
def test_a_printed_pattern_parses_back_to_itself(pattern):
    assert parse(str(pattern)) == pattern


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused_with_a_site_error(text):
    try:
        address = parse(text)
    except SiteError:
        return
    assert parse(str(address)) == address


@pytest.mark.parametrize(
    ("text", "site"),
    [
        ("layer4.2.conv1", Site("layer4.2.conv1")),
        ("layer4.2.conv1:input", Site("layer4.2.conv1", port="input")),
        ("attn:input[mask]", Site("attn", port="input", key=("mask",))),
        ("encoder:output[hidden][0]", Site("encoder", port="output", key=("hidden", 0))),
        ("x:output['a b']['0'][-1]", Site("x", key=("a b", "0", -1))),
        ("lstm@2", Site("lstm", call=2)),
        ("layer1.0/add#1@3:grad_output", Site("layer1.0", "add", 1, 3, "grad_output")),
        ("/view", Site("", "view")),
        (":output", Site("")),
        ("`a b`.`c``d`.0", Site("a b.c`d.0")),
        ("`*`", Site("*")),
    ],
)
def test_addresses_of_the_documentation(text, site):
    assert parse(text) == site


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("layer*.*.conv?", "layer1.0.conv2", True),
        ("layer*.*.conv?", "layer1.0.conv10", False),
        ("*", "a", True),
        ("*", "a.b", False),
        ("**", "a.b", True),
        ("**", "", False),
        ("**.x", "x", True),
        ("**.x", "a.b.x", True),
        ("a.**", "a", True),
        ("a.**.c", "a.c", True),
        ("a.**.c", "a.b.b.c", True),
        ("a.**.c", "b.c", False),
        ("`*`.?", "*.b", True),
        ("`*`.?", "a.b", False),
        ("**<Conv2d>", "any.where", True),
    ],
)
def test_what_a_pattern_matches(pattern, path, fits):
    assert parse(pattern).matches(path) is fits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "address '' is empty"),
        ("fc1:gradinput", "no port 'gradinput': expected one of .*; did you mean ':grad_input'?"),
        ("fc1:output_grad", "did you mean ':grad_output'?"),
        ("fc1:weight", "a parameter is part of the path, 'fc1.weight:param'"),
        ("fc1:bias:grad", "a parameter is part of the path, 'fc1.bias:grad'"),
        (":output[h]:grad", "a port comes once, ahead of its key: expected ':grad_output.h.'"),
        ("fc1[0][x]:grad_input", "a port comes once, ahead of its key: expected 'fc1:grad_input.0..x.'"),
        ("fc1:output:input", "cannot be read from ':input' on: expected 'path <Class> /op#k @call :port"),
        ("a..b", "has an empty name at character 2"),
        ("a.", "has an empty name at character 2"),
        ("a***", "mixes '\\*\\*' with other characters"),
        ("`a.b`", "has a dot inside `a.b`"),
        ("a b", "cannot be read from ' b' on.*backticks"),
        (r"a:output['\x']", "is no Python string"),
    ],
)
def test_messages(text, message):
    with pytest.raises(SiteError, match=message):
        parse(text)


def test_a_pattern_where_one_site_is_needed():
    with pytest.raises(SiteError, match=r"'\*\*.fc' is a pattern: expected one exact site"):
        parse_site("**.fc")


def test_near_names_come_by_spelling_then_by_last_name():
    assert nearest("fc9", ["fc1", "conv", "fc2"]) == ["fc2", "fc1"]
    assert nearest("query", ["encoder.layer.0.query", "pooler"]) == ["encoder.layer.0.query"]


def test_a_class_below_a_wrapper_is_skipped_as_the_wrapper_is():
    class OnlyOneDevice(torch.nn.DataParallel):
        """As people write it, to reach the model's attributes."""

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    wrapped = OnlyOneDevice(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with gaff.capture(wrapped, "0") as got:
        y = wrapped(torch.ones(1, 2))
    assert torch.equal(got["0"], y)
