"""Scripts as vLLM's users write them run here with only their import line changed."""

import asyncio
import copy
import io
import json
import multiprocessing
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from cli.cli_models import make_model
from engine.fakes import make_engine
from error_codes import raises_code
from holdfast.api.async_llm import AsyncLLM
from holdfast.api.llm import LLM
from holdfast.api.progress import GenerationBar, is_watched
from holdfast.errors import HoldfastError, KeywordError, NameAbsentError, PromptError, RequestError, TransferError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.vllm_names import METHOD_NAMES

BATCH = """
from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The future of AI is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=6, seed=3, logprobs=2, n=2, best_of=None)
llm = LLM(model=MODEL, tensor_parallel_size=1, trust_remote_code=True, gpu_memory_utilization=0.5, swap_space=4,
          enforce_eager=True, max_model_len=128, dtype="float", disable_log_stats=True, tokenizer_mode="auto")
outputs = llm.generate(prompts=prompts, sampling_params=sampling_params, use_tqdm=False, lora_request=None)
results = []
for output in outputs:
    for completion in output.outputs:
        results.append({
            "id": output.request_id, "prompt": output.prompt, "ids": output.prompt_token_ids, "text": completion.text,
            "tokens": list(completion.token_ids), "sum": completion.cumulative_logprob, "why": completion.finish_reason,
            "stop": completion.stop_reason, "finished": output.finished,
            "best": [max(step.values(), key=lambda entry: entry.logprob).decoded_token for step in completion.logprobs],
        })
del llm
"""

CHAT = """
from vllm import LLM

llm = LLM(MODEL, max_model_len=200, seed=None, compilation_config={}, quantization=None)
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 5
sampling_params.temperature = 0
conversation = [{"role": "system", "content": "You are kind"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
outputs = llm.chat([conversation, conversation[1:]], sampling_params, use_tqdm=False, add_generation_prompt=True,
                   continue_final_message=False, tools=None, chat_template_content_format="auto",
                   chat_template_kwargs={"enable_thinking": False})
results = [{"text": output.outputs[0].text, "tokens": list(output.outputs[0].token_ids)} for output in outputs]
own = llm.chat(conversation[1:], sampling_params, chat_template="{{ messages[0].content }}!", use_tqdm=False)
results.append({"prompt": own[0].prompt})
"""

TOKENS = """
from vllm import LLM, SamplingParams, TokensPrompt, TextPrompt

llm = LLM(model=MODEL, max_num_seqs=4, max_model_len=200, disable_custom_all_reduce=True, block_size=16)
tokenizer = llm.get_tokenizer()
text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
ids = tokenizer.encode(text, add_special_tokens=False)
assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True) == ids
params = SamplingParams(temperature=0.0, max_tokens=5, stop_token_ids=[tokenizer.eos_token_id], ignore_eos=True,
                        bad_words=["z"], skip_special_tokens=False, spaces_between_special_tokens=True)
ways = [text, TextPrompt(prompt=text), TokensPrompt(prompt_token_ids=ids), {"prompt_token_ids": ids}, ids]
outputs = llm.generate(ways, params, use_tqdm=False)
outputs += llm.generate(prompt_token_ids=[ids], sampling_params=params, use_tqdm=False)
results = [{"tokens": list(output.outputs[0].token_ids)} for output in outputs]
allowed = SamplingParams(allowed_token_ids=tokenizer.convert_tokens_to_ids(["a", "b"]), max_tokens=8, ignore_eos=True)
results.append({"letters": tokenizer.decode(llm.generate(text, allowed, use_tqdm=False)[0].outputs[0].token_ids)})
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vllm") / "model")


def run(script: str, model: Path) -> list[dict]:
    """The script with its import line changed, and nothing else."""
    assert script.count("from vllm import") == 1
    names: dict[str, object] = {"MODEL": model}
    exec(script.replace("from vllm import", "from holdfast import"), names)
    if isinstance(names.get("llm"), LLM):
        names["llm"].shutdown()
    json.dumps(names["results"])
    return names["results"]


def test_vllm_script_batch_of_prompts_runs(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    results = run(BATCH, model)
    assert [result["prompt"] for result in results] == ["Hello, my name is"] * 2 + ["The future of AI is"] * 2
    assert all(len(result["tokens"]) == len(result["best"]) <= 6 and result["sum"] < 0 for result in results)
    assert {result["why"] for result in results} <= {"length", "stop"}
    assert all(result["finished"] and result["ids"] for result in results)
    (line,) = [record.getMessage() for record in caplog.records if "accepted without effect" in record.getMessage()]
    for name in ("trust_remote_code", "swap_space", "disable_log_stats", "tokenizer_mode"):
        assert name in line


def test_vllm_script_chat_runs(model: Path) -> None:
    first, second, own = run(CHAT, model)
    assert 1 <= len(first["tokens"]) <= 5
    assert 1 <= len(second["tokens"]) <= 5
    assert own["prompt"] == "Hi!"


def test_vllm_script_token_prompts_match_in_each_form(model: Path) -> None:
    *ways, letters = run(TOKENS, model)
    assert len(ways) == 6
    assert all(way == ways[0] for way in ways)
    assert set(letters["letters"]) <= {"a", "b"}


POLICY = """
from vllm import LLM, SamplingParams

llm = LLM(MODEL, max_num_seqs=1, max_model_len=64, scheduling_policy=POLICY)
engine, order = llm._live().engine, []
for number in (2, 0, 1):
    given = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, priority=number if POLICY == "priority" else 0)
    engine.add_request(str(number), "Hello", given)
while engine.has_unfinished():
    order += [delta.request_id for delta in engine.step()]
results = [{"order": list(dict.fromkeys(order))}]
"""


@pytest.mark.parametrize(("policy", "order"), [("priority", ["0", "1", "2"]), ("fcfs", ["2", "0", "1"])])
def test_scheduling_policy_of_a_script_decides_the_order(
    model: Path, caplog: pytest.LogCaptureFixture, policy: str, order: list[str]
) -> None:
    assert run(POLICY.replace("POLICY", repr(policy)), model) == [{"order": order}]
    assert "scheduling_policy" not in caplog.text, "it has an effect"


def test_scheduling_policy_fcfs_refuses_a_priority(model: Path) -> None:
    with LLM(model, max_model_len=64, scheduling_policy="fcfs") as llm:
        with raises_code("request.no_priorities", RequestError, priority=1):
            llm.generate("Hello", SamplingParams(max_tokens=2, priority=1))
        assert llm.generate("Hello", SamplingParams(max_tokens=2))


def make_llm(**options) -> LLM:
    return LLM.from_engine(make_engine(**options))


@pytest.mark.parametrize(
    ("call", "code", "advice"),
    [
        (lambda llm: llm.generate("x", sampling_param=None), "unknown_option", "sampling_params?"),
        (lambda llm: llm.generate("x", lora_request=object()), "unsupported_option", "merge"),
        (lambda llm: llm.generate("x", priority=[1]), "unsupported_option", "use SamplingParams"),
        (
            lambda llm: llm.chat([{"role": "user", "content": "x"}], add_generation_promt=True),
            "unknown_option",
            "add_gen",
        ),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], lora_request=1), "unsupported_option", "merge"),
        (lambda llm: llm.stream("x", cachesalt="x"), "unknown_option", "cache_salt?"),
    ],
)
def test_llm_wrong_keyword_names_the_nearest(call, code: str, advice: str) -> None:
    with raises_code(f"value.{code}", KeywordError) as caught:
        call(make_llm())
    assert isinstance(caught.value, TypeError)
    assert advice in str(caught.value)


def test_generate_needs_prompts_or_ids_but_not_both() -> None:
    with raises_code("api.prompts_or_ids", PromptError):
        make_llm().generate()
    with raises_code("api.prompts_or_ids", PromptError):
        make_llm().generate("x", prompt_token_ids=[[1]])


def test_generate_without_params_uses_generation_defaults() -> None:
    from holdfast.loading.planning.open_model import GenerationDefaults

    engine = make_engine(max_model_len=20)
    engine.generation = GenerationDefaults(temperature=0.0)
    greedy = SamplingParams(temperature=0.0)
    llm = LLM.from_engine(engine)
    assert llm.generate("Hello")[0].outputs == llm.generate("Hello", greedy)[0].outputs


def test_generate_max_tokens_beyond_the_context_ends_by_length() -> None:
    (output,) = make_llm(max_model_len=32).generate("Hello", SamplingParams(temperature=0.0, max_tokens=5000))
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 27)


def test_generate_without_detokenize_returns_only_tokens() -> None:
    (output,) = make_llm().generate("Hello", SamplingParams(temperature=0.0, max_tokens=4, detokenize=False))
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 4)


def test_generate_skip_reading_prefix_cache_has_no_prefix_hit() -> None:
    llm = make_llm()
    params = SamplingParams(temperature=0.0, max_tokens=2)
    llm.generate("x" * 40, params)
    assert llm.generate("x" * 40, params)[0].num_cached_tokens > 0
    params.skip_reading_prefix_cache = True
    assert llm.generate("x" * 40, params)[0].num_cached_tokens == 0


@pytest.mark.parametrize(
    "move", [pickle.dumps, copy.copy, copy.deepcopy, multiprocessing.reduction.ForkingPickler.dumps]
)
@pytest.mark.parametrize("kind", ["llm", "async", "engine", "inside a list"])
def test_llm_pickle_or_copy_is_refused(move, kind: str) -> None:
    engine = make_engine()
    if kind == "async":
        subject = AsyncLLM.from_engine(engine)
    else:
        subject = {"llm": LLM.from_engine(engine), "engine": engine, "inside a list": [LLM.from_engine(engine)]}[kind]
    if kind == "inside a list" and move is copy.copy:
        return
    with pytest.raises(TypeError, match="cannot be pickled or copied") as caught:
        move(subject)
    assert isinstance(caught.value, TransferError)
    assert isinstance(caught.value, HoldfastError)
    if kind == "async":
        subject.shutdown()


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_llm_absent_vllm_method_says_what_to_use(kind: type[LLM | AsyncLLM]) -> None:
    llm = kind.from_engine(make_engine())
    name = kind.__name__
    assert not METHOD_NAMES.keys() & set(dir(kind))
    for method, do in METHOD_NAMES.items():
        assert not hasattr(llm, method)
        with raises_code("request.unsupported_name", NameAbsentError, owner=name, name=method, instead=do) as caught:
            getattr(llm, method)
        assert isinstance(caught.value, AttributeError)
    for typo, near in (("generat", "generate"), ("get_tokeniser", "get_tokenizer"), ("chats", "chat")):
        with raises_code("request.unknown_name", owner=name, name=typo, hint=f"Did you mean {near}?"):
            getattr(llm, typo)
    with raises_code("request.unknown_name") as caught:
        llm.qqqq  # noqa: B018
    assert {"chat", "generate"} <= set(caught.value.values["hint"].removeprefix("Accepted: ").split(", "))
    assert getattr(llm, "missing", None) is None
    for advised in {"health", "engine", "drain"} - set(dir(kind)):  # what is advised does not lead back in a circle
        with pytest.raises(NameAbsentError) as caught:
            getattr(llm, advised)
        assert not any(f"Did you mean {missing}?" in str(caught.value) for missing in METHOD_NAMES)
    with pytest.raises(AttributeError) as plain:  # notebooks and copies probe for such names
        llm._repr_html_  # noqa: B018
    assert not isinstance(plain.value, HoldfastError)
    llm.shutdown()


def test_llm_subclass_property_error_names_the_subclass() -> None:
    class Own(LLM):
        @property
        def own(self) -> object:
            return self.forgotten  # type: ignore[attr-defined]

    llm = Own.from_engine(make_engine())
    with raises_code("request.unknown_name", NameAbsentError, owner="Own", name="forgotten"):
        llm.own  # noqa: B018
    llm.shutdown()


THREADS = """
import os, torch, holdfast
from holdfast.forks import refuse_lost_threads
torch.set_num_threads(2)
if USES_THREADS:
    torch.ones(2_000_000).add_(1)
use_threads = lambda: torch.ones(2_000_000).add_(1)
refuse_lost_threads(use_threads)
for num_threads in (1, 2):
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        continue
    torch.set_num_threads(num_threads)
    try:
        refuse_lost_threads(use_threads)
        print(num_threads, "goes on", flush=True)
    except holdfast.HoldfastError as error:
        print(num_threads, error, flush=True)
    os._exit(0)
"""


@pytest.mark.slow  # the next but one asks the same of a whole model
@pytest.mark.parametrize("uses_threads", [True, False])
def test_torch_threads_stay_in_their_parent_process(uses_threads: bool) -> None:
    script = THREADS.replace("USES_THREADS", str(uses_threads))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    first, second = done.stdout.splitlines()
    assert first == "1 goes on"
    assert (second == "2 goes on") == (not uses_threads), second
    assert uses_threads == ("whose torch threads it does not have" in second)


FORKS = f"""
import asyncio, multiprocessing, os, sys, threading
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from engine.fakes import make_engine
from holdfast.api.async_llm import AsyncLLM
from holdfast.api.llm import LLM
from holdfast.api.llm_engine import LLMEngine
from holdfast.errors import HoldfastError

stepped = LLMEngine.from_engine(make_engine())
llm, other = LLM.from_engine(make_engine()), AsyncLLM.from_engine(make_engine())
begun = llm.stream("x")
next(begun)


async def read():
    async for output in other.generate("x"):
        pass


def use():
    calls = [lambda: llm.generate("x"), lambda: llm.chat([{{"role": "user", "content": "x"}}]), lambda: next(begun)]
    calls += [lambda: llm.stream("x"), llm.reset_prefix_cache, lambda: asyncio.run(read()), other.health, stepped.step]
    for call in calls:
        try:
            call()
        except HoldfastError as error:
            print(error, flush=True)
    if sys.argv[1] == "closed":
        llm.shutdown()
        other.shutdown()
        stepped.shutdown()


held = threading.Event()
def hold(lock):
    with lock:
        held.set()
        threading.Event().wait()
for lock in (llm._driver.lock, other._thread._changed):
    held.clear()
    threading.Thread(target=hold, args=(lock,), daemon=True).start()
    held.wait()
child = multiprocessing.get_context("fork").Process(target=use)
child.start()
child.join()
pid = os.fork()
if pid == 0:
    use()
    sys.exit(0)  # with everything that runs at an interpreter's end
print(child.exitcode, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("ending", ["closed", pytest.param("forgotten", marks=pytest.mark.slow)])
def test_llm_used_in_a_forked_child_is_refused_and_child_ends(ending: str) -> None:
    """Locks are held by other threads while it forks, as they are during a step: no caller ever opens them in the child."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, ending], check=False, timeout=60, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    *reported, codes = run.stdout.splitlines()
    assert codes == "0 0", run.stderr
    assert len(reported) == 2 * 8, run.stdout
    words = r"an (Async)?LLM(Engine)? of process \d+ was used in process \d+, a fork of it\. .*'spawn'.*"
    assert all(re.fullmatch(words, line) for line in reported), reported


OPENED_IN_A_FORK = """
import os, sys
import torch
import holdfast.forks
holdfast.forks.PATIENCE_SECONDS = 2.0
from holdfast import LLM, HoldfastError, SamplingParams

params = SamplingParams(max_tokens=2, temperature=0.0)
torch.set_num_threads(2)
print(LLM(sys.argv[1], max_model_len=64).generate([1, 2, 3], params)[0].outputs[0].token_ids, flush=True)
for threads in (2, 1):
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(threads)
        try:
            print(LLM(sys.argv[1], max_model_len=64).generate([1, 2, 3], params)[0].outputs[0].token_ids)
        except HoldfastError as error:
            print(error)
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0, threads
"""


@pytest.mark.slow
def test_llm_opened_in_a_forked_child_answers_or_is_refused(model: Path) -> None:
    """With the threads of its parent the child would wait for ever; with one thread it needs none."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OPENED_IN_A_FORK, str(model)],
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    own, refused, alone = run.stdout.splitlines()
    assert own == alone
    assert re.fullmatch(r"Process \d+ is a fork of \d+, whose torch threads it does not have\. .*'spawn'.*", refused)


def test_get_tokenizer_has_the_methods_of_transformers() -> None:
    tokenizer = make_llm().get_tokenizer()
    ids = tokenizer.encode("Hé<eos>")
    assert tokenizer.decode(ids) == "Hé<eos>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hé"
    assert tokenizer.batch_decode([ids, [72]]) == ["Hé<eos>", "H"]
    assert tokenizer("ab") == {"input_ids": [97, 98], "attention_mask": [1, 1]}
    assert tokenizer(["a", "bc"])["input_ids"] == [[97], [98, 99]]
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<eos>", 257, None)
    assert tokenizer.convert_tokens_to_ids("<eos>") == 257
    assert tokenizer.convert_ids_to_tokens([97, 257]) == ["a", "<eos>"]
    assert tokenizer.tokenize("ab") == ["a", "b"]
    assert 257 in tokenizer.all_special_ids
    assert len(tokenizer) == tokenizer.vocab_size
    message = [{"role": "user", "content": "a<eos>"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "user: a<eos>\n"
    assert 257 not in tokenizer.apply_chat_template(message)
    assert 257 in tokenizer.apply_chat_template(message, allow_special_tokens=True)
    assert tokenizer.apply_chat_template([message, message], tokenize=False) == ["user: a<eos>\n"] * 2
    for wrong in ("text", [[1], [2]], None):
        with pytest.raises(PromptError, match="list of integers"):
            tokenizer.decode(wrong)


def test_chat_control_tokens_in_content_are_text() -> None:
    message = [{"role": "user", "content": "a<eos>"}]
    params = SamplingParams(temperature=0.0, max_tokens=1)
    llm = make_llm()
    assert 257 not in llm.chat(message, params)[0].prompt_token_ids
    assert 257 in llm.chat(message, params, allow_special_tokens=True)[0].prompt_token_ids
    assert 257 in llm.generate("a<eos>", params)[0].prompt_token_ids

    async def ask() -> list[int]:
        async with AsyncLLM.from_engine(make_engine()) as asynchronous:
            return [output async for output in asynchronous.chat(message, params)][-1].prompt_token_ids

    assert 257 not in asyncio.run(ask())


class ZMQInteractiveShell:
    """The class of a notebook's shell."""


@pytest.mark.parametrize("shell", [ZMQInteractiveShell(), None])
def test_bars_show_in_a_notebook_but_not_in_a_log_file(monkeypatch: pytest.MonkeyPatch, shell: object) -> None:
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    assert is_watched() is (shell is not None)
    with GenerationBar(2, wanted=True) as bar:
        bar.count(1, 10, 10)
        bar.count(2, 20, 20)
    assert ("2/2" in stream.getvalue()) is (shell is not None)
