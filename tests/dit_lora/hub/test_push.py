"""A push against the fake Hub: one commit, resumable, polite, and never a word of the token."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from card_rules import card_problems
from diffusers import CogVideoXPipeline
from fake_hub import SIGNATURE, Account, FakeHub, Fault
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import dit_lora
from dit_lora.cli.app import app
from dit_lora.config.load import load_recipe
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.hub.push import prepare_publication, push

REPO = "me/kitten-lora"
ADAPTER = "pytorch_lora_weights.safetensors"
FILES = {
    "README.md",
    "config.yaml",
    ADAPTER,
    "samples/before_00.mp4",
    "samples/after_00.mp4",
    "verification.json",
}


def pushed(run_dir: Path, *, private: bool = True) -> tuple[str, list[str]]:
    """The last line of a push, and those before."""
    messages: list[str] = []
    return push(run_dir, REPO, private=private, say=messages.append), messages


def told(said: list[str]) -> list[str]:
    """Messages other than the list of files."""
    return [line for line in said if line.startswith("hub: ")]


def uploads(hub: FakeHub) -> list[str]:
    return [request for request in hub.requests if request.startswith("PUT")]


def commits(hub: FakeHub) -> int:
    return len(hub.repos[REPO].commits) - 1


def test_a_run_is_one_commit_of_adapter_card_samples_and_a_recipe_that_loads(
    hub: FakeHub, run_dir: Path, tmp_path: Path
) -> None:
    line, _ = pushed(run_dir)
    assert line == f"pushed 6 files to {hub.url}/{REPO}"
    assert set(hub.repos[REPO].files) == FILES
    assert commits(hub) == 1
    assert hub.repos[REPO].private
    assert hub.read(REPO, ADAPTER) == (run_dir / "adapter" / ADAPTER).read_bytes()
    samples = run_dir / "samples"
    first_samples, last_samples = (sorted(samples.glob("step_*"))[index] for index in (0, -1))
    assert hub.read(REPO, "samples/before_00.mp4") == (first_samples / "prompt_00.mp4").read_bytes()
    assert hub.read(REPO, "samples/after_00.mp4") == (last_samples / "prompt_00.mp4").read_bytes()
    (tmp_path / "config.yaml").write_bytes(hub.read(REPO, "config.yaml"))
    published_recipe, original_recipe = (
        load_recipe(tmp_path / "config.yaml"),
        load_recipe(run_dir / "config.yaml"),
    )
    assert (published_recipe.lora, published_recipe.optim) == (
        original_recipe.lora,
        original_recipe.optim,
    )
    assert card_problems(hub.read(REPO, "README.md").decode()) == []


def test_nothing_of_the_machine_is_published(hub: FakeHub, run_dir: Path) -> None:
    """The run's folder, its data, its base and its cache are all below a folder `secretive`."""
    pushed(run_dir)
    for name in FILES:
        content = hub.read(REPO, name)
        for secret in (b"secretive", b"/tmp", str(Path.home()).encode(), b"canary", b"_disc.mp4"):
            assert secret not in content, (name, secret)
    config = yaml.safe_load(hub.read(REPO, "config.yaml"))
    assert (config["model"]["path"], config["data"]["path"]) == ("base", "path/to/data")
    assert "hub" not in config


def test_a_second_push_has_nothing_to_do_and_a_third_sends_what_changed(hub: FakeHub, run_dir: Path) -> None:
    pushed(run_dir)
    hub.requests.clear()
    line, _ = pushed(run_dir)
    assert line.startswith("nothing to send: ")
    assert not uploads(hub)
    assert commits(hub) == 1
    for sample in (run_dir / "samples").glob("step_*/prompt_00.mp4"):
        sample.unlink()
    line, _ = pushed(run_dir)
    assert line.startswith("pushed 4 files")  # of which the card is new: it shows no samples now
    assert set(hub.repos[REPO].files) == {name for name in FILES if "samples" not in name}
    assert commits(hub) == 2


def test_what_others_put_there_stays(hub: FakeHub, run_dir: Path) -> None:
    hub.add(REPO, {"notes.txt": b"mine", "base_weights.safetensors": b"of an earlier run"})
    pushed(run_dir, private=False)
    assert set(hub.repos[REPO].files) == FILES | {"notes.txt"}


def test_a_cut_connection_is_gone_on_with_where_it_broke(hub: FakeHub, run_dir: Path, waits: list[float]) -> None:
    """The first push loses its connection during an upload and fails; the second sends only the missing blobs."""
    hub.faults = [Fault(rf"PUT /lfs/{digest(run_dir)}", cut="before", times=1000)]
    with pytest.raises(DitLoraError) as error:
        pushed(run_dir)
    message = str(error.value)
    assert message.endswith(f"To continue: dit-lora push {run_dir} {REPO}")
    assert "\n" not in message
    assert commits(hub) == 0
    assert uploads(hub).count(f"PUT /lfs/{digest(run_dir)}") == 6  # the library's own tries
    assert sum(waits) < 30
    hub.faults, hub.requests = [], []
    assert pushed(run_dir)[0].startswith("pushed 6 files")
    assert uploads(hub) == [f"PUT /lfs/{digest(run_dir)}"]


def digest(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "adapter" / ADAPTER).read_bytes()).hexdigest()


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_commit_that_fails_once_is_tried_again(hub: FakeHub, run_dir: Path, waits: list[float], status: int) -> None:
    hub.faults = [Fault("POST .*/commit/", status, headers={"Retry-After": "7"})]
    line, messages = pushed(run_dir)
    assert line.startswith("pushed")
    assert waits == [7.0]
    assert told(messages)[1].startswith(f"hub: the Hub answered {status}: injected; trying again in 7 s")
    assert commits(hub) == 1


def test_a_hub_that_stays_down_is_given_up_on_after_a_bound(hub: FakeHub, run_dir: Path, waits: list[float]) -> None:
    hub.faults = [Fault("POST .*/commit/", 500, times=1000)]
    with pytest.raises(DitLoraError, match=r"answered 500: injected\. Nothing is lost. To continue: "):
        pushed(run_dir)
    assert waits == [2.0, 4.0, 8.0]


def test_a_wait_of_an_hour_is_left_to_the_user(hub: FakeHub, run_dir: Path, waits: list[float]) -> None:
    hub.faults = [Fault("POST .*/commit/", 429, headers={"Retry-After": "3600"})]
    with pytest.raises(DitLoraError, match="retry after 3600 s"):
        pushed(run_dir)
    assert waits == []


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_commit_whose_answer_is_lost_is_made_once(hub: FakeHub, run_dir: Path, waits: list[float], cut: str) -> None:
    hub.faults = [Fault("POST .*/commit/", cut=cut)]  # type: ignore[arg-type]
    pushed(run_dir)
    assert commits(hub) == 1
    assert set(hub.repos[REPO].files) == FILES


def test_somebody_elses_commit_in_between_is_not_overwritten(
    hub: FakeHub, run_dir: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, first_calls = HfApi.create_commit, iter([True])

    def late(*args: object, **kwargs: object) -> object:
        if next(first_calls, False):
            hub.add(REPO, {"notes.txt": b"in between"})
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(HfApi, "create_commit", late)
    _, messages = pushed(run_dir)
    assert any("was changed in the meantime (412)" in line for line in messages)
    assert set(hub.repos[REPO].files) == FILES | {"notes.txt"}


def test_an_error_page_in_place_of_json_is_tried_again(hub: FakeHub, run_dir: Path, waits: list[float]) -> None:
    hub.faults = [Fault("POST /api/validate-yaml", 503, page=True)]
    assert pushed(run_dir)[0].startswith("pushed")


def test_who_may_not_push_is_told_so_at_once(
    hub: FakeHub, run_dir: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal() -> str:
        with pytest.raises(DitLoraError) as error:
            pushed(run_dir)
        message = str(error.value)
        assert error.value.exit_code == 2
        assert f"To continue: dit-lora push {run_dir} {REPO}" in message
        assert "\n" not in message
        assert "canary" not in message
        return message

    hub.accounts = {}
    assert "does not know this token (401): log in with `hf auth login`" in refusal()
    hub.accounts = {"hf_canarycanarycanary": Account("me", "read")}
    assert "the token of me can only read" in refusal()
    hub.accounts = {"hf_canarycanarycanary": Account("you", "write", ("club",))}
    assert "you cannot write there; OWNER must be one of you, club" in refusal()
    hub.accounts = {"hf_canarycanarycanary": Account("you", "fineGrained")}
    assert "(403: You don't have the rights to create a model under me/kitten-lora)" in refusal()
    hub.accounts = None
    monkeypatch.delenv("HF_TOKEN")
    assert "there is no Hugging Face token; log in with `hf auth login`" in refusal()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal()
    assert REPO not in hub.repos
    assert waits == []


def test_private_means_private(hub: FakeHub, run_dir: Path) -> None:
    """Also for the command, which nobody asks whether it is at a terminal; `--public` says otherwise."""
    pushed(run_dir)
    assert hub.repos[REPO].private
    assert pushed(run_dir, private=False)[0].startswith("nothing to send")
    assert hub.repos[REPO].private  # and stays so
    hub.repos[REPO].private = False
    with pytest.raises(DitLoraError, match="already exists and is public"):
        pushed(run_dir)
    result = CliRunner().invoke(app, ["push", str(run_dir), REPO], input="y\n")
    assert "allow everybody to see it with --public" in str(result.exception)
    for name, options in (("me/a", []), ("me/b", ["--private"]), ("me/c", ["--public"])):
        result = CliRunner().invoke(app, ["push", str(run_dir), name, *options], input="y\n")
        assert result.exit_code == 0
        assert hub.repos[name].private == (options != ["--public"])
        visibility = "private" if hub.repos[name].private else "public"
        assert f"files to {hub.url}/{name}, which is {visibility} (" in result.stderr


def test_every_file_is_listed_before_it_is_sent(hub: FakeHub, run_dir: Path) -> None:
    _, messages = pushed(run_dir)
    listed_files = messages[: next(n for n, line in enumerate(messages) if line.startswith("hub: "))]
    assert {line.split()[-1] for line in listed_files} == FILES


def test_the_command_lists_first_and_pushes_then(hub: FakeHub, run_dir: Path) -> None:
    result = CliRunner().invoke(app, ["push", str(run_dir), REPO, "--dry-run"])
    assert result.exit_code == 0
    names = {line.split()[-1] for line in result.stdout.splitlines()[:-1]}
    assert names == FILES
    assert f"The model card is {run_dir / 'README.md'}" in result.stdout
    assert not hub.requests
    assert card_problems((run_dir / "README.md").read_text()) == []
    result = CliRunner().invoke(app, ["push", str(run_dir), REPO, "--private"])
    assert result.exit_code == 0
    assert result.stdout.endswith(f"pushed 6 files to {hub.url}/{REPO}\n")
    assert hub.read(REPO, "README.md") == (run_dir / "README.md").read_bytes()
    for invalid_name in ("kitten", "me/kit ten", "a/b/c", "me/.git"):
        result = CliRunner().invoke(app, ["push", str(run_dir), invalid_name])
        assert "OWNER/NAME" in str(result.exception)


def test_the_token_is_nowhere(
    hub: FakeHub,
    run_dir: Path,
    waits: list[float],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor what signs an upload, which the library's own warnings would show."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["validation"]["prompts"] = ["hf_canarycanarycanary walks", "b"]
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    hub.faults = [
        Fault("PUT /lfs", 503),
        Fault("PUT /lfs", cut="before"),
        Fault("POST .*/commit/", 500, message="of hf_canarycanarycanary"),
    ]
    _, messages = pushed(run_dir)
    output = "".join(capfd.readouterr()) + caplog.text + "\n".join(messages)
    assert "503" in output
    hub_bytes = b"".join(hub.read(REPO, name) for name in hub.repos[REPO].files)
    for path in run_dir.rglob("*.md"):
        hub_bytes += path.read_bytes()
    for secret in ("canarycanary", SIGNATURE):
        assert secret not in output
        assert secret.encode() not in hub_bytes


def test_a_run_without_a_result_is_refused_with_the_command_that_goes_on(run_dir: Path) -> None:
    (run_dir / "adapter" / ADAPTER).unlink()
    with pytest.raises(DitLoraError) as error:
        prepare_publication(run_dir, REPO)
    assert f"no adapter/{ADAPTER}); it is at step 2 of 2" in str(error.value)
    assert f"dit-lora train {run_dir}/config.yaml train.resume=auto" in str(error.value)
    with pytest.raises(DitLoraError, match="is not a run"):
        prepare_publication(run_dir / "samples", REPO)


@pytest.mark.parametrize("how", ["nan", "no effect", "torn"])
def test_a_poisoned_adapter_is_refused(run_dir: Path, how: str) -> None:
    file = run_dir / "adapter" / ADAPTER
    tensors = load_file(file)
    name = next(name for name in tensors if "lora_B" in name)
    if how == "nan":
        tensors[name][0, 0] = torch.nan
        save_file(tensors, file)
    elif how == "no effect":
        save_file({n: t * ("lora_B" not in n) for n, t in tensors.items()}, file)
    else:
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckFailedError, match=f"is not pushed: adapter/{ADAPTER}"):
        prepare_publication(run_dir, REPO)
    assert not (run_dir / "README.md").exists()


def test_a_run_that_failed_its_verification_is_refused(run_dir: Path) -> None:
    file = run_dir / "verification.json"
    record = json.loads(file.read_text())
    record["passed"] = False
    record["checks"]["scale"] = {"passed": False, "words": "alpha is missing"}
    file.write_text(json.dumps(record))
    with pytest.raises(CheckFailedError, match="did not pass its verification") as error:
        prepare_publication(run_dir, REPO)
    assert "- scale: alpha is missing" in str(error.value)
    file.write_text("torn")
    with pytest.raises(CheckFailedError, match="did not pass"):
        prepare_publication(run_dir, REPO)


def test_stock_diffusers_and_ours_load_it_from_the_hub(
    hub: FakeHub, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(run_dir)
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    base = Path(config["model"]["path"])
    trained = load_file(run_dir / "adapter" / ADAPTER)
    name, tensor = next((n, t) for n, t in trained.items() if "lora_B" in n)
    for load in (
        lambda pipe: pipe.load_lora_weights(REPO),
        lambda pipe: dit_lora.load_adapter(pipe, REPO),
    ):
        pipe = CogVideoXPipeline.from_pretrained(base, text_encoder=None, tokenizer=None, vae=None)
        load(pipe)
        loaded_parameters = dict(pipe.transformer.named_parameters())
        diffusers_name = name.removeprefix("transformer.").replace(".lora_B.", ".lora_B.default_0.")
        assert torch.equal(loaded_parameters[diffusers_name], tensor)
    monkeypatch.chdir(tmp_path)
    command = ["sample", REPO, "--model", str(base), "--prompt", "a disc", "--inference-steps", "1"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert re.fullmatch(r"samples/kitten-lora/seed_0_a-disc_\w+\.mp4\n", result.stdout)
    with pytest.raises(DitLoraError, match=r"me/nothing, and it cannot be downloaded"):
        dit_lora.load_adapter(pipe, "me/nothing")
