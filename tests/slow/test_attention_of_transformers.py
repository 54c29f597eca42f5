"""The weights of fused attention are those of attention written out, over all that transformers has in both ways.

All of them take seven minutes (``make survey``); the slow tests run every twelfth.
"""

import os

import pytest

from attention_of_transformers import compare, kinds

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PARTS = 12

# Where the two differ: the models themselves return something else, or there is nothing to compare with.
KNOWN = {
    "aimv2": "calls the fused op either way",
    "aimv2_vision_model": "calls the fused op either way",
    "glm5_next": "what the models return by 0.",  # with padding, of sparse attention
    "glm5_next_text": "what the models return by 0.",
    "paligemma": "what the models return by 0.",  # fused, a text without an image is not masked causally
}


@pytest.mark.parametrize("part", range(PARTS if os.environ.get("SURVEY") else 1))
def test_fused_weights_are_those_of_attention_written_out(part):
    found = {kind: compare(kind) for kind in kinds()[part::PARTS]}
    different = {kind: reason for kind, (state, _, reason) in found.items() if state == "differs"}
    assert {kind: reason for kind, reason in different.items() if KNOWN.get(kind, "?") not in reason} == {}
    equal = [count for state, count, _ in found.values() if state == "equal"]
    assert len(equal) >= 12
    assert sum(equal) >= 40
