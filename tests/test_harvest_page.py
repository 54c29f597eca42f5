"""The page of a harvest: what it tells is what the store holds, and nothing in a text of it can run."""

import re
from html import unescape

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gaff
from gaff.cli import main
from gaff.harvesting.overview import overview, save_page
from test_harvest import Tokens, texts

pytest.importorskip("numpy")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Features of which one is large in few rows, a row with a NaN, labels of both kinds."""
    rows = torch.randn(300, 5, generator=torch.Generator().manual_seed(0))
    rows[[7, 40], 3] = torch.tensor([50.0, 90.0])
    rows[100, 0] = float("nan")
    data = DataLoader(TensorDataset(rows, torch.arange(300) % 3, rows[:, 1]), batch_size=50)
    out = tmp_path_factory.mktemp("paged") / "acts<b>"
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with pytest.warns(UserWarning, match="1 of 300 rows hold a NaN"):
        return gaff.harvest(model, data, "0", out=out, shard=2, labels={"kind": 1, "score": 2})


def test_what_is_told_is_what_is_there(store):
    told = overview(store, features=2)
    [site] = told.sites
    rows = store["0"][:]
    assert (site.shape, site.dtype, site.nonfinite) == ("300x5", "float32", 1)
    finite = rows.double().norm(dim=1)[~rows.isnan().any(1)]
    assert sum(site.norms.counts) == 299
    assert (site.norms.low, site.norms.high) == (float(finite.min()), float(finite.max()))
    number, peak, examples = site.features[0]
    assert number == 3
    assert [one.value for one in examples[:2]] == [90.0, 50.0]
    assert examples[0].known.startswith("sample 40, kind 1, score ")
    assert peak == pytest.approx(90 / float(rows[:, 3].double().square().mean().sqrt()))
    assert dict(told.labels)["kind"] == "0: 100 rows, 1: 100 rows, 2: 100 rows"
    assert dict(told.labels)["sample"] == "from 0 to 299"
    assert told.looked == "all rows were read"


def test_of_many_rows_some_are_read_and_that_is_told(tmp_path):
    data = DataLoader(TensorDataset(torch.randn(20_000, 3)), batch_size=1000)
    many = gaff.harvest(nn.Sequential(nn.Identity()), data, "0", out=tmp_path / "acts")
    assert overview(many, rows=5000).looked == "4096 of 20000 rows were read, spread evenly"
    assert overview(many, rows=10_000).looked == "8192 of 20000 rows were read, spread evenly"
    with pytest.raises(gaff.PlanError, match="expected 1 row or more"):
        overview(many, rows=0)


def test_the_page_is_escaped_and_allows_no_script(store, tmp_path):
    hostile = "</td><script>alert(1)</script>"
    save_page(store, tmp_path / "a.html", show=lambda row, labels: hostile)
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "acts<b>" not in text
    assert hostile in unescape(text)
    assert "default-src 'none'" in text
    assert not re.search(r"https?://(?!www\.w3\.org)", text)
    assert text.count('role="img" aria-label=') == 1
    links = re.findall(r'href="#([^"]+)"', text)
    assert links
    assert all(f'id="{one}"' in text for one in links)


def test_texts_in_parts_and_pictures(store, tmp_path):
    pytest.importorskip("PIL")

    def show(row, labels):
        assert labels["sample"] == row
        return torch.rand(3, 8, 8) if row % 2 else ("before ", "<it>", " after")

    save_page(store, tmp_path / "a.html", show=show)
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "before <mark>&lt;it&gt;</mark> after" in text
    assert 'src="data:image/png;base64,' in text
    with pytest.raises(gaff.PlanError, match=r"show= gave a tensor of shape \[5\]: expected a picture"):
        save_page(store, tmp_path / "b.html", show=lambda row, labels: torch.ones(5))
    with pytest.raises(gaff.RecordError, match="cannot be written"):
        save_page(store, tmp_path / "no" / "b.html")


def test_rows_of_which_only_the_largest_were_kept(tmp_path):
    sparse = gaff.harvest(Tokens(), texts(), "block", out=tmp_path / "top", rows="token", top=2)
    whole = gaff.harvest(Tokens(), texts(), "block", out=tmp_path / "all", rows="token")
    [site] = overview(sparse).sites
    dense = torch.zeros_like(whole["block"][:])
    dense.scatter_(1, sparse.labels["place of block"][:].long(), sparse["block"][:])
    for number, _, examples in site.features:
        assert [one.value for one in examples] == dense[:, number].topk(len(examples)).values.tolist()


def test_the_command(store, tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("\n".join(f"line number {number}" for number in range(300)))
    line = ["report", str(store.place), "--html", str(tmp_path / "a.html")]
    assert main([*line, "--data", str(tmp_path / "lines.txt")]) == 0
    assert "line number 40" in (tmp_path / "a.html").read_text(encoding="utf-8")
    assert main(line[:2]) == 0
    assert "300x5" in capsys.readouterr().out
    for more, told in ((["--data", "none.txt"], "'none.txt' is not there"), (["--json"], "has no --json"),
                       (["--tokenizer", "x"], "the rows have no label 'token'")):  # fmt: skip
        assert main([*line, *more]) == 1
        assert told in capsys.readouterr().err


def of_one(rows, out, **options):
    data = DataLoader(TensorDataset(rows), batch_size=500)
    return gaff.harvest(nn.Sequential(nn.Identity()), data, "0", out=out, **options)


def test_features_of_sparse_rows_have_their_own_numbers(tmp_path):
    rows = torch.zeros(5000, 2, 10)
    rows[:, 0, 0] = 1
    rows[4500, 1, 4], rows[10, 1, 9] = 9, 2
    [site] = overview(of_one(rows, tmp_path / "acts", top=1)).sites
    found = {number: [one.known for one in examples] for number, _, examples in site.features}
    assert found[14] == ["sample 4500"]
    assert found[19] == ["sample 10"]
    assert set(found) == {0, 14, 19}


def test_labels_with_a_nan_and_rows_that_are_very_large(tmp_path):
    rows = torch.randn(16, 4)
    rows[3, 1] = float("nan")
    with pytest.warns(UserWarning, match="1 of 16 rows"):
        told = overview(of_one(rows, tmp_path / "acts", dtype="int8"))
    scales = rows.abs().amax(1)[rows.isfinite().all(1)] / 127
    assert dict(told.labels)["scale of 0"] == f"from {scales.min().item()} to {scales.max().item()}, NaN: 1 row"
    [site] = overview(of_one(torch.full((4, 4), 1e25), tmp_path / "large")).sites
    assert site.norms.high == pytest.approx(2e25, rel=1e-5)


def test_the_part_behind_is_shown_also_where_none_is_meant(store, tmp_path):
    save_page(store, tmp_path / "a.html", show=lambda row, labels: ("head", "", " tail"))
    assert "head tail" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_complex_rows_are_told_by_their_sizes_and_complex_labels_by_their_kind(tmp_path):
    class Spectrum(nn.Module):
        def forward(self, x):
            return torch.fft.fft(x)

    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    store = gaff.harvest(Spectrum(), [x], ":output", out=tmp_path / "acts", labels=lambda x: {"phase": x[:, 0] * 1j})
    told = overview(store, features=2)
    norms = torch.linalg.vector_norm(torch.fft.fft(x).to(torch.complex128), dim=1)
    assert (told.sites[0].norms.low, told.sites[0].norms.high) == pytest.approx(
        (float(norms.min()), float(norms.max()))
    )
    assert dict(told.labels)["phase"] == "complex64 for each row"


def test_the_context_of_a_token_shows_where_tokens_were_not_kept(tmp_path):
    from gaff.cli.store_page import _in_context

    class Words:
        def decode(self, ids):
            return " ".join("abcdefgh"[one] for one in ids)

    ids = torch.arange(8).unsqueeze(0)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    store = gaff.harvest(Tokens(), [batch], "embed", out=tmp_path / "acts", rows=lambda batch: (ids != 2) & (ids != 5))
    show = _in_context(store, Words())
    found = [show(row, {name: one[row].item() for name, one in store.labels.items()}) for row in range(6)]
    assert [" ".join("".join(one).split()) for one in found] == ["a b … d e … g h"] * 6
