"""`holdfast run`: text to stdout and nothing else, the rest to stderr, and every bad input in one line."""

import json
import shutil
from pathlib import Path

import pytest

from cli.cli_models import CHAT_TEMPLATE, Here, make_model, refuse
from cli.page_reader import read_page


def record(here: Here, *arguments: object, **options: object) -> dict:
    ended = here("run", *arguments, "--json", **options)
    assert ended.code == 0, ended
    assert ended.out.count("\n") == 1
    return json.loads(ended.out, parse_constant=refuse)


def test_text_goes_to_stdout_and_the_account_to_stderr(here: Here, tiny: Path) -> None:
    ended = here("run", tiny, "-p", "Hello", "--max-tokens", "8", "--ignore-eos")
    assert ended.code == 0, ended
    said = record(here, tiny, "-p", "Hello", "--max-tokens", "8", "--ignore-eos")["text"]
    assert ended.out == said.removesuffix("\n") + "\n"
    lines = ended.err.splitlines()
    owners = [line.split("  ")[0] for line in lines]
    assert {"weights", "kv pages"} < set(owners[owners.index("owner") : owners.index("total")])
    assert "KV cache size: 256 tokens" in ended.err
    assert lines[-1].startswith("prompt 11 tokens, generated 8 tokens, first token ")
    assert "prefill" in lines[-1]
    assert "decode" in lines[-1]


@pytest.mark.parametrize("more", [(), ("-q",), ("--json",)], ids=["loud", "quiet", "json"])
def test_run_memory_report_writes_page(here: Here, tiny: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    file = tmp_path / "memory.html"
    ended = here("run", tiny, "-p", "Hello", "--max-tokens", "2", "--memory-report", file, *more)
    assert ended.code == 0, ended
    assert read_page(file.read_text(encoding="utf-8")).all("h1")[0].text == f"Memory of {tiny.name}"
    assert ("memory report written to" in ended.err) is (not more)


def test_run_quiet_prints_text_alone(here: Here, tiny: Path) -> None:
    ended = here("run", tiny, "-p", "Hello", "-q", "--max-tokens", "4")
    assert ended.code == 0
    assert ended.err == ""
    assert ended.out.endswith("\n")


def test_run_json_has_usage_timings_and_logprobs(here: Here, tiny: Path) -> None:
    options = ("-p", "Hello", "--max-tokens", "6", "--ignore-eos", "--logprobs", "2", "--prompt-logprobs", "1")
    found = record(here, tiny, *options)
    assert found["finish_reason"] == "length"
    assert len(found["token_ids"]) == 6
    assert found["usage"] == {"prompt_tokens": 11, "cached_tokens": 0, "completion_tokens": 6, "total_tokens": 17}
    assert found["timings"]["first_token_seconds"] > 0
    assert found["timings"]["decode_tokens_per_second"] > 0
    assert {row["owner"] for row in found["memory"]["rows"]} >= {"weights", "kv pages"}
    assert len(found["logprobs"]) == 6
    assert all(str(token) in position for token, position in zip(found["token_ids"], found["logprobs"], strict=True))
    assert found["prompt_logprobs"][0] is None
    assert len(found["prompt_logprobs"]) == 11
    assert "outputs" not in found


def test_run_n_prints_several_answers(here: Here, tiny: Path) -> None:
    options = ("-p", "Hello", "--max-tokens", "4", "--ignore-eos", "--n", "3")
    found = record(here, tiny, *options)
    assert [len(output["token_ids"]) for output in found["outputs"]] == [4, 4, 4]
    assert len({tuple(output["token_ids"]) for output in found["outputs"]}) > 1, "chance is needed for several answers"
    prompt = len("[u]Hello[a]")
    usage = {"prompt_tokens": prompt, "cached_tokens": 0, "completion_tokens": 12, "total_tokens": prompt + 12}
    assert found["usage"] == usage
    assert (found["text"], found["token_ids"]) == tuple(found["outputs"][0][name] for name in ("text", "token_ids"))
    assert found["memory"]["kv_tokens"] == 3 * 256, "memory is planned for each of them"
    shown = here("run", tiny, *options, "-q").out
    texts = [f"--- {place} of 3 ---\n{one['text']}\n" for place, one in enumerate(found["outputs"], 1)]
    assert shown == "".join(texts)


def test_memory_is_planned_for_one_request(here: Here, tiny: Path) -> None:
    options = ("-p", "Hello", "--max-tokens", "2")
    assert record(here, tiny, *options)["memory"]["kv_tokens"] == 256
    assert record(here, tiny, *options, "--max-num-seqs", "4")["memory"]["kv_tokens"] == 1024


def test_run_prompt_joins_option_and_stdin(here: Here, tiny: Path) -> None:
    def answer(*options: str, stdin: str = "") -> tuple[int, list[int]]:
        found = record(here, tiny, *options, "--max-tokens", "12", "--ignore-eos", stdin=stdin)
        return found["usage"]["prompt_tokens"], found["token_ids"]

    whole = answer("-p", "One\n\ntwo")
    assert answer("-p", "One", stdin="two\n") == whole
    assert answer(stdin="One\n\ntwo\r\n") == whole
    assert answer("-p", "One") != whole


def test_raw_text_is_not_put_into_the_template(here: Here, tiny: Path, bare: Path) -> None:
    def num_prompt_tokens(model: Path, *options: str) -> int:
        return record(here, model, "-p", "Hello", "--max-tokens", "1", *options)["usage"]["prompt_tokens"]

    assert num_prompt_tokens(tiny, "--raw") == 5
    assert num_prompt_tokens(tiny) == 5 + len("[u][a]")
    assert num_prompt_tokens(bare) == 5
    assert num_prompt_tokens(tiny, "--system", "Hm") == 5 + len("[s]Hm[u][a]")


def test_greedy_is_the_default_and_a_seed_repeats_the_rest(here: Here, tiny: Path) -> None:
    options = ("-p", "Hello", "--max-tokens", "12", "--ignore-eos")
    greedy = record(here, tiny, *options)["token_ids"]
    assert record(here, tiny, *options, "--temperature", "0")["token_ids"] == greedy
    warm = [record(here, tiny, *options, "--temperature", "2", "--seed", seed)["token_ids"] for seed in (1, 1, 2)]
    assert warm[0] == warm[1]
    assert warm[0] != warm[2]


def test_run_follows_generation_config_temperature(here: Here, tiny: Path, tmp_path: Path) -> None:
    advised = shutil.copytree(tiny, tmp_path / "advised")
    (advised / "generation_config.json").write_text(json.dumps({"temperature": 2.0, "eos_token_id": 2}))
    options = ("-p", "Hello", "--max-tokens", "12", "--ignore-eos")
    assert record(here, advised, *options)["token_ids"] == record(here, tiny, *options, "--temp", "2")["token_ids"]
    assert record(here, advised, *options, "--temp", "0")["token_ids"] == record(here, tiny, *options)["token_ids"]


def test_run_default_max_tokens_fits_context(here: Here, tiny: Path) -> None:
    found = record(here, tiny, "-p", "Hello", "--ignore-eos", "--max-model-len", "20")
    assert found["usage"]["total_tokens"] == 20
    assert found["finish_reason"] == "length"


def test_run_max_tokens_beyond_context_is_cut_with_warning(here: Here, tiny: Path) -> None:
    ended = here("run", tiny, "-p", "Hello", "--max-tokens", "10000", "--ignore-eos", "--json")
    assert ended.code == 0, ended
    record = json.loads(ended.out)
    assert (record["finish_reason"], record["usage"]["total_tokens"]) == ("length", 256)
    assert ended.err.count("10000") == 1


def test_run_control_tokens_need_allow_special_tokens(here: Here, tiny: Path) -> None:
    options = ("run", tiny, "-p", "a</s>b", "--max-tokens", "1", "--json")
    counts = [
        json.loads(here(*options, *more).out)["usage"]["prompt_tokens"] for more in ((), ("--allow-special-tokens",))
    ]
    assert counts == [len("[u]a</s>b[a]"), len("[u]ab[a]") + 1]
    assert json.loads(here(*options, "--raw").out)["usage"]["prompt_tokens"] == 3


def test_run_default_cut_answer_prints_notice(here: Here, tiny: Path) -> None:
    reported = "cut at 9 tokens; --max-tokens N allows more, within the context"
    options = (tiny, "-p", "Hello", "--ignore-eos", "--max-model-len", "20")
    assert here("run", *options).err.splitlines()[-1] == reported
    assert "cut at" not in here("run", *options, "--max-tokens", "9").err, "it was requested"


BAD_OPTIONS = [
    (("--temperature", "nan"), "temperature"),
    (("--temperature", "hot"), "temperature"),
    (("--top-p", "1.5"), "top_p"),
    (("--n", "100000"), "n"),
    (("--logprobs", "500", "--json"), "logprobs"),
    (("--logprobs", "5"), "cli.needs_json"),
    (("--stop", "x" * 5000), "5000"),
    (("--stop", ""), "stop"),
    (("--max-tokens", "0"), "max_tokens"),
    (("--max-tokens", "8q"), "max_tokens"),
    (("--max-model-len", "many"), "max_model_len"),
    (("--dtype", "float31"), "float32"),
    (("--device", "tpu"), "device"),
    (("--memory-limit", "lots"), "memory_limit"),
    (("--quantization", "fp3"), "quantization"),
    (("--block-size", "16", "--page-tokens", "8"), "page_tokens"),
    (("--raw", "--system", "Be brief"), "cli.exclusive"),
    (("--logit-bias", "no"), "--logit-bias 42=-100"),
    (("--memory-report", "no/such/folder/memory.html"), "its folder does not exist"),
    (("--memory-report", ""), "cli.bad_page_file"),
    (("--memory-utilization", "110%"), "memory_utilization"),
]


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS, ids=[" ".join(options)[:30] for options, _ in BAD_OPTIONS])
def test_bad_options_are_refused_before_anything_is_opened(here: Here, options: tuple[str, ...], words: str) -> None:
    ended = here("run", "no/such/model", "-p", "Hello", *options)
    assert ended.code == 2, ended
    assert ended.out == ""
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("error: ")
    assert ended.refuses(words), ended


BAD_REQUESTS = [
    (("-p", "x" * 300), "256"),
    (("-p", "x" * 300, "--max-model-len", "64"), "64"),
    (("-p", ""), "cli.no_prompt"),
    ((), "cli.no_prompt"),
    (("-p", "\udc80"), "surrogate"),
    (("-p", "Hello", "--stop-token-ids", "999999"), "999999"),
    (("-p", "Hello", "--chat-template", "{{ messages.__class__ }}"), "template"),
    (("-p", "Hello", "--chat-template", "{% for i in range(10**9) %}x{% endfor %}"), "template"),
    (("-p", "Hello", "--chat-template", "{% oops"), "template"),
    (("-p", "Hello", "--max-model-len", "1G"), "short"),
]


@pytest.mark.parametrize(
    ("options", "words"), BAD_REQUESTS, ids=[" ".join(options)[:30] or "none" for options, _ in BAD_REQUESTS]
)
def test_bad_requests_are_refused_in_one_line(here: Here, tiny: Path, options: tuple[str, ...], words: str) -> None:
    ended = here("run", tiny, "-q", *options)
    assert ended.code in (1, 2), ended
    assert ended.out == ""
    assert ended.err.count("\n") == 1, ended
    assert ended.refuses(words), ended


def test_bytes_that_are_no_text_are_refused(here: Here, tiny: Path) -> None:
    ended = here("run", tiny, stdin=b"caf\xe9")
    assert ended.code == 2
    assert "byte 3 is 0xe9" in ended.err


def test_run_system_message_without_template_is_refused(here: Here, bare: Path) -> None:
    ended = here("run", bare, "-q", "-p", "Hello", "--system", "Be brief")
    assert ended.code == 2
    assert "no chat template" in ended.err


def broken(tiny: Path, folder: Path, name: str) -> Path:
    """A model in which one thing is wrong; the path to pass."""
    model = shutil.copytree(tiny, folder / "model")
    weights, config = model / "model.safetensors", json.loads((model / "config.json").read_text())
    if name == "no such path":
        return folder / "modell"
    if name == "hub name":
        return Path("org/name")
    if name == "no config":
        (model / "config.json").unlink()
    elif name == "empty folder":
        return Path(shutil.copytree(folder, folder / "empty", ignore=lambda *_: ["model", "empty"]))
    elif name == "unknown architecture":
        (model / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    elif name == "config is no JSON":
        (model / "config.json").write_text("{")
    elif name == "wrong shape":
        (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    elif name == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif name == "no weights":
        weights.unlink()
    elif name == "pickle":
        weights.rename(model / "pytorch_model.bin")
    elif name == "pickle file":
        return Path(shutil.copy(weights, folder / "model.pt"))
    elif name == "one file":
        return weights
    elif name == "broken tokenizer":
        (model / "tokenizer.json").write_text("{}")
    elif name == "no tokenizer":
        (model / "tokenizer.json").unlink()
    elif name == "index points outside":
        weights.unlink()
        index = {"weight_map": {"model.embed_tokens.weight": "../../elsewhere.safetensors"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    elif name == "no GGUF":
        (folder / "model.gguf").write_bytes(b"GGUFnonsense")
        return folder / "model.gguf"
    return model


BROKEN_MODELS = [
    ("no such path", "Did you mean"),
    ("hub name", "hf download org/name"),
    ("no config", "has no config.json"),
    ("empty folder", "It holds nothing"),
    ("unknown architecture", "LlamaForCausalLM"),
    ("config is no JSON", "config.json"),
    ("wrong shape", "down_proj"),
    ("truncated weights", "model.safetensors"),
    ("no weights", "safetensors"),
    ("pickle", "pytorch_model.bin) has its weights as pickle files"),
    ("pickle file", "pickle"),
    ("one file", "Pass the whole folder"),
    ("broken tokenizer", "tokenizer.json"),
    ("no tokenizer", "tokenizer.json"),
    ("index points outside", "elsewhere.safetensors"),
    ("no GGUF", "model.gguf"),
]


@pytest.mark.parametrize(("name", "words"), BROKEN_MODELS, ids=[name for name, _ in BROKEN_MODELS])
def test_broken_models_are_refused_in_one_line(
    here: Here, tiny: Path, tmp_path: Path, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    ended = here("run", broken(tiny, tmp_path, name), "-q", "-p", "Hello")
    assert ended.code == 1, ended
    assert ended.out == ""
    assert ended.err.count("\n") == 1, ended
    assert ended.refuses(words), ended


def test_run_over_memory_limit_prints_table(here: Here, tiny: Path) -> None:
    ended = here("run", tiny, "-q", "-p", "Hello", "--memory-limit", "64KiB")
    assert ended.code == 1
    assert "short" in ended.err
    assert "weights" in ended.err


def test_loading_is_reported_where_none_watches(here: Here, tmp_path: Path) -> None:
    model = make_model(tmp_path / "A-Model")
    ended = here("run", model, "-p", "Hello", "--max-tokens", "1")
    assert ended.err.startswith("Loading A-Model\n")
    assert "\nTaking KV pages and workspace\nModel loading took " in ended.err
    assert "\x1b" not in ended.err + ended.out
    assert CHAT_TEMPLATE not in ended.out


def test_proposals_change_no_answer_and_are_counted(here: Here, tiny: Path) -> None:
    options = ("-p", "abababababab", "--max-tokens", "40", "--ignore-eos", "--temperature", "0")
    plain = here("run", tiny, *options)
    guessing = here("run", tiny, *options, "--speculative", "ngram:3")
    assert (guessing.code, guessing.out) == (0, plain.out), guessing
    assert "draft tokens accepted" in guessing.err.splitlines()[-1]
    assert "proposed" not in plain.err
    wrong = here("run", tiny, *options, "--speculative", "eagle")
    assert wrong.code != 0
    assert wrong.refuses("config.speculative", value="eagle", maximum=16), wrong
