"""Every kind of bad sample has the fault that it claims, and the audit says so of it and of nothing beside it."""

import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bad_media_checks import OF_FOLDER, OF_MEDIA, Seen, is_sound, members
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.faults.media.all import KINDS
from benchmarks.faults.media.cache import DAMAGES, Damage
from benchmarks.faults.media.kind import Kind
from dit_lora.config.data import DataConfig
from dit_lora.data.audit.captions import check_captions
from dit_lora.data.audit.encoded import check_encoded
from dit_lora.data.audit.finding import VERDICTS, Finding
from dit_lora.data.audit.labels import check_labels
from dit_lora.data.audit.runner import audit_media
from dit_lora.data.cache.cache import TensorCache, encode_entry
from dit_lora.data.sources.clips import Clip
from dit_lora.data.sources.scan import scan_sources

# No permission stops root, who can read every file.
MADE = [kind for kind in KINDS if kind.root_can or os.geteuid()]
BY_NAME = {kind.name: kind for kind in MADE}
TWINS = {"duplicate_clip", "near_duplicate_clip"}
REAL_CLIPS = Path(__file__).parents[5] / "shared" / "data" / "clips"
every_kind = pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.name)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each kind, by its name."""
    root = tmp_path_factory.mktemp("bad_media")
    folders = {kind.name: root / str(number) for number, kind in enumerate(MADE)}
    for kind in MADE:
        kind.write(folders[kind.name])
    return folders


def is_one_file(kind: Kind, folder: Path) -> bool:
    return not kind.writes_good and (folder / kind.file).is_file() and not (folder / "metadata.jsonl").exists()


@every_kind
def test_each_kind_has_the_fault_that_it_claims(corpus: dict[str, Path], kind: Kind) -> None:
    folder = corpus[kind.name]
    if kind.code is None:
        assert kind.writes_good or is_sound(Seen(folder / kind.file))
        assert not kind.writes_good or len({member.name for member in members(folder)}) == 4
    elif is_one_file(kind, folder) and kind.code in OF_MEDIA:
        bad, good = Seen(folder / kind.file), Seen(folder / kind.good)
        assert OF_MEDIA[kind.code](bad, good)
        assert is_sound(good)
        if "duplicate" not in kind.code:
            assert not OF_MEDIA[kind.code](good, bad)
    else:
        assert OF_FOLDER[kind.code](folder)


def test_the_corpus_reaches_every_code_that_media_captions_and_labels_can_have() -> None:
    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names) >= 110
    assert {kind.code for kind in KINDS if kind.code} == {*OF_MEDIA, *OF_FOLDER}
    assert sum(kind.verdict == "ok" for kind in KINDS) >= 15
    assert all((kind.code is None) == (kind.verdict == "ok") for kind in KINDS)


Findings = dict[str, list[Finding]]
"""By sample id."""


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token a word, with T5's special tokens."""
    vocabulary = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def audited(corpus: dict[str, Path]) -> dict[str, Findings]:
    """What is found of each kind's samples, by its name; every sample that was read has a list."""
    tokenizer = word_tokenizer()
    findings_by_file: dict[str, Findings] = {}
    configs: dict[str, DataConfig] = {}
    clips: dict[str, list[Clip]] = defaultdict(list)
    for kind in MADE:
        data = DataConfig(**kind.data, path=str(corpus[kind.name]))
        try:
            scan_result = scan_sources(data)
        except OSError as error:  # none should come through
            findings_by_file[kind.name] = {kind.file: [Finding("crashed", str(error), "reject")]}
            continue
        of_kind = findings_by_file[kind.name] = {clip.id: [] for clip in scan_result.clips}
        for problem in scan_result.problems:
            finding = Finding(problem.code, problem.message, "reject")
            of_kind.setdefault(problem.file, []).append(finding)
        checks = [check_captions(scan_result.clips, tokenizer, 226)]
        if data.classes is not None:
            checks = [check_labels(scan_result.clips, data.classes)[0]]
        for file, findings in [pair for check in checks for pair in check.items()]:
            of_kind[file] += findings
        key = str(sorted(kind.data))
        configs[key] = data
        clips[key] += [replace(clip, id=f"{kind.name}\0{clip.id}") for clip in scan_result.clips]
    for key, data in configs.items():  # all at once, as the clips of one large set
        for sample in audit_media(clips[key], data, workers=2):
            name, _, file = sample.file.partition("\0")
            # Kinds share pictures: a sample is like those of other folders, which says nothing of it.
            twins = TWINS if BY_NAME[name].code not in TWINS else set()
            findings_by_file[name][file] += [item for item in sample.findings if item.code not in twins]
    return findings_by_file


def verdict_of(findings: list[Finding]) -> str:
    return VERDICTS[max((VERDICTS.index(finding.verdict) for finding in findings), default=0)]


@every_kind
def test_each_kind_gets_its_verdict(audited: dict[str, Findings], kind: Kind) -> None:
    findings_by_file = audited[kind.name]
    assert kind.file in findings_by_file
    assert verdict_of(findings_by_file[kind.file]) == kind.verdict, findings_by_file[kind.file]
    codes = {finding.code for finding in findings_by_file[kind.file]}
    assert kind.code in codes if kind.code else not codes
    assert all(finding.message for finding in findings_by_file[kind.file])


@every_kind
def test_the_sound_sample_beside_it_stays_sound(audited: dict[str, Findings], kind: Kind) -> None:
    findings = audited[kind.name][kind.good]
    assert [finding for finding in findings if finding.code not in TWINS] == []


@pytest.mark.skipif(not REAL_CLIPS.is_dir(), reason="the real clips are not on this machine")
def test_no_real_clip_is_rejected() -> None:
    data = DataConfig(path=str(REAL_CLIPS), frames=17, height=240, width=360, fps=8)
    scan_result = scan_sources(data)
    assert not scan_result.problems
    samples = audit_media(scan_result.clips, data, workers=2)
    assert len(samples) == 7
    assert not {sample.file: sample.reasons for sample in samples if sample.verdict == "reject"}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_a_damaged_cache_is_found_out_and_costs_no_other_shard(tmp_path: Path, damage: Damage) -> None:
    generator = torch.Generator().manual_seed(0)
    for shard in ("ab", "cd"):
        entries = [
            encode_entry(
                key,
                {
                    "latent_mean": torch.randn(4, 3, 4, 6, generator=generator),
                    "prompt_embeds": torch.randn(5, 8, generator=generator),
                },
                sample=f"{key}.mp4",
                facts={},
            )
            for key in shard
        ]
        TensorCache(tmp_path).write_entries(entries)
    (target,) = [entry for entry in TensorCache(tmp_path).iter_entries() if entry.sample == "b.mp4"]
    spec = target.layout.spec
    damage.do(target)

    cache = TensorCache(tmp_path)
    assert cache.is_complete("b") == damage.seems_whole
    results = {key: cache.read(key, spec) for key in "abcd"}
    findings, _ = check_encoded((key, tensors) for key, (tensors, _) in results.items())
    codes = {key: {finding.code for finding in findings.get(key, ())} for key in "abcd"}
    for key, (_, fault) in results.items():
        codes[key] |= {"cache_damaged"} if fault else set()
    assert damage.code in codes["b"]
    assert {"cache_damaged"} <= codes["b"]
    assert not codes["c"] | codes["d"]
    assert damage.reaches_neighbour == bool(codes["a"])
