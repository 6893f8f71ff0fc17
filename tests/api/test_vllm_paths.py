"""Import lines of vLLM's programs: each finds its object, or an ImportError in one sentence; LLMEngine and outputs as deltas."""

import asyncio
import dataclasses
import importlib
import sys

import pytest

import holdfast
from engine.fakes import make_engine
from error_codes import raises_code
from holdfast.api.async_llm import AsyncLLM
from holdfast.api.llm import LLM, OPEN_ENDED_WARNED
from holdfast.api.llm_engine import LLMEngine
from holdfast.api.vllm_paths import MODULES, NAMES, VllmPaths, cleanup_dist_env_and_memory, install
from holdfast.cli.engine_args import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
from holdfast.config import EngineConfig
from holdfast.errors import (
    ConfigError,
    EngineDeadError,
    HoldfastError,
    ImportAbsentError,
    KeywordError,
    NameAbsentError,
    RequestError,
)
from holdfast.request.sampling_params import RequestOutputKind, SamplingParams
from holdfast.request.structured import StructuredOutputs

LINES = """
from holdfast import LLM, SamplingParams, EngineArgs, AsyncEngineArgs, LLMEngine, AsyncLLMEngine, TextPrompt, TokensPrompt
from holdfast import CompletionOutput, PromptType, RequestOutput
from holdfast.sampling_params import SamplingParams, StructuredOutputsParams, GuidedDecodingParams, RequestOutputKind
from holdfast.engine.arg_utils import EngineArgs, AsyncEngineArgs
from holdfast.engine.llm_engine import LLMEngine
from holdfast.engine.async_llm_engine import AsyncLLMEngine
from holdfast.v1.engine.async_llm import AsyncLLM
from holdfast.outputs import RequestOutput, CompletionOutput
from holdfast.inputs import TextPrompt, TokensPrompt, PromptType
from holdfast.utils import FlexibleArgumentParser, random_uuid
from holdfast.utils.argparse_utils import FlexibleArgumentParser
from holdfast.entrypoints.llm import LLM
from holdfast.distributed import cleanup_dist_env_and_memory
from holdfast.distributed.parallel_state import cleanup_dist_env_and_memory
from holdfast.logger import init_logger
from holdfast.logprobs import Logprob
from holdfast.version import __version__
"""

ABSENT = [
    ("from holdfast.lora.request import LoRARequest", "merge the adapter"),
    ("from holdfast.sampling_params import BeamSearchParams", "use n, with temperature"),
    ("from holdfast import ModelRegistry", "CONTRIBUTING.md"),
    ("from holdfast.multimodal.utils import fetch_image", "only text is read here"),
    ("from holdfast.assets.image import ImageAsset", "only text is read here"),
    ("from holdfast.config import KVTransferConfig", "keys and values stay in this process"),
    ("from holdfast.distributed.weight_transfer import x", "open the model anew"),
    ("from holdfast.v1.sample.logits_processor import LogitsProcessor", "use logit_bias"),
    ("from holdfast.v1.metrics.reader import Counter", "llm.stats()"),
    ("import holdfast.envs as envs", "environment variables"),
    ("from holdfast.model_executor.models import x", "CONTRIBUTING.md"),
    ("from holdfast.utils.network_utils import get_ip", "inside of vLLM"),
    ("from holdfast.entrypoints.openai.protocol import x", "holdfast serve"),
]


def run_line(line: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(line, names)
    return names


@pytest.mark.parametrize("line", LINES.strip().splitlines())
def test_vllm_import_line_finds_our_objects(line: str) -> None:
    names = run_line(line)
    for name in line.partition(" import ")[2].split(", "):
        assert names[name] is not None
        home = str(getattr(names[name], "__module__", ""))
        assert home.partition(".")[0] != "vllm", "an object has its home in this package"


@pytest.mark.parametrize(("line", "words"), ABSENT, ids=[line for line, _ in ABSENT])
def test_vllm_absent_name_is_an_import_error_in_one_line(line: str, words: str) -> None:
    with pytest.raises(ImportError) as caught:
        run_line(line)
    assert isinstance(caught.value, ImportAbsentError)
    assert caught.value.code in ("api.absent_name", "config.absent_name")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "from holdfast import Nonsense",
        "import holdfast.nonsense",
        "from holdfast.sampling_params import Nonsense",
        "from holdfast.engine.nonsense import x",
        "from holdfast.config import Nonsense",
    ],
)
def test_vllm_unknown_name_is_a_plain_import_error(line: str) -> None:
    with pytest.raises(ImportError) as caught:
        run_line(line)
    assert not isinstance(caught.value, HoldfastError)


def test_vllm_aliases_are_the_same_objects() -> None:
    for name in NAMES:
        assert getattr(holdfast, name) is not None
    names = run_line("from holdfast.sampling_params import *\nfrom holdfast.v1.engine.async_llm import AsyncLLM")
    assert names["SamplingParams"] is SamplingParams
    assert names["StructuredOutputsParams"] is names["GuidedDecodingParams"] is StructuredOutputs
    assert names["AsyncLLM"] is holdfast.AsyncLLMEngine is AsyncLLM
    for module in MODULES:
        if module != "distributed":
            assert sorted(importlib.import_module(f"holdfast.{module}").__all__) == sorted(MODULES[module])


def test_hasattr_of_an_absent_name_is_false() -> None:
    assert not hasattr(holdfast, "PoolerConfig")
    with raises_code("api.absent_name", NameAbsentError, name="holdfast.ModelRegistry"):
        holdfast.ModelRegistry  # noqa: B018
    module = importlib.import_module("holdfast.sampling_params")
    assert not hasattr(module, "BeamSearchParams")
    assert not hasattr(module, "__wrapped__")


def test_vllm_paths_install_twice_adds_one_finder() -> None:
    install()
    assert sum(isinstance(finder, VllmPaths) for finder in sys.meta_path) == 1


def test_structured_outputs_params_take_vllm_fields() -> None:
    form = StructuredOutputs(choice=["yes", "no"], json_object=None, disable_any_whitespace=False, structural_tag=None)
    assert form == StructuredOutputs(choice=("yes", "no"))
    for params in (
        {"guided_decoding": form},
        {"structured_outputs": form},
        {"guided_decoding": {"choice": ["yes", "no"]}},
    ):
        assert SamplingParams(**params).structured_outputs == form
    with raises_code("value.unsupported_option", KeywordError, name="structural_tag", value="x"):
        StructuredOutputs(structural_tag="x")
    with raises_code("request.two_grammars", KeywordError, first="structured_outputs", second="guided_decoding"):
        SamplingParams(structured_outputs=form, guided_decoding=form)


def test_engine_args_fill_in_from_a_command_line(caplog: pytest.LogCaptureFixture) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="m")
    typed = "--max_model_len 8k --gpu-memory-utilization 0.5 -tp 2 --trust-remote-code --no-enable-lora --enforce-eager"
    args = parser.parse_args([*typed.split(), "--swap-space=4", "--no-enable-prefix-caching"])
    assert (args.tensor_parallel_size, args.disable_log_stats, args.max_num_seqs) == (2, None, None)
    made = EngineArgs.from_cli_args(args)
    same = {"max_model_len": 8000, "memory_utilization": 0.5, "tensor_parallel_size": 2, "enforce_eager": True}
    assert made.create_engine_config() == EngineConfig(model="m", enable_prefix_caching=False, **same)
    assert "trust_remote_code=True" in caplog.text
    assert "swap_space=4" in caplog.text
    assert "disable_log_stats" not in caplog.text, "what was not typed is not reported"
    with raises_code("value.unsupported_option", ConfigError, name="enable_lora"):
        EngineArgs.from_cli_args(parser.parse_args(["--enable-lora"]))


def test_engine_args_check_a_field_that_is_set_later() -> None:
    args = AsyncEngineArgs("m", gpu_memory_utilization=0.5)
    args.gpu_memory_utilization = 0.25
    args.max_model_len = "auto"
    assert (args.memory_utilization, args.gpu_memory_utilization, args.max_model_len) == (0.25, 0.25, None)
    with raises_code("value.out_of_range", ConfigError, name="max_model_len", value=0):
        args.max_model_len = 0
    assert EngineConfig.from_options(**dataclasses.asdict(args)) == args.create_engine_config()
    with pytest.raises(AttributeError, match="has no nonsense"):
        args.nonsense  # noqa: B018


def step_all(engine: LLMEngine) -> dict[str, list]:
    """Outputs of each request, in order."""
    found: dict[str, list] = {}
    for _ in range(200):
        if not engine.has_unfinished_requests():
            return found
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    raise AssertionError("requests never end")


def test_llm_engine_steps_to_the_answers_of_an_llm() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6)
    engine = LLMEngine.from_engine(make_engine())
    for name, prompt in (("0", "Hello"), ("1", "A longer prompt")):
        assert engine.add_request(name, prompt, params, lora_request=None, priority=0) == name
    assert engine.get_num_unfinished_requests() == 2
    found = step_all(engine)
    assert engine.get_num_unfinished_requests() == 0
    assert engine.step() == []
    expected = LLM.from_engine(make_engine()).generate(["Hello", "A longer prompt"], params)
    for name, whole in zip("01", expected, strict=True):
        outputs = found[name]
        assert outputs[-1].finished
        assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
        assert outputs[-1].outputs[0].token_ids == whole.outputs[0].token_ids
        assert [len(output.outputs[0].token_ids) for output in outputs] == sorted(
            len(output.outputs[0].token_ids) for output in outputs
        )
    assert engine.reset_prefix_cache(reset_running_requests=True)
    engine.shutdown()
    engine.shutdown()
    with raises_code("api.shut_down", EngineDeadError, kind="LLMEngine"):
        engine.add_request("2", "x", params)


def test_llm_engine_abort_ends_a_request_without_output() -> None:
    engine = LLMEngine.from_engine(make_engine())
    for name in "ab":
        engine.add_request(name, "Hello", sampling_params=SamplingParams(temperature=0.0, max_tokens=8))
    engine.step()
    engine.abort_request(["a"])
    found = step_all(engine)
    assert set(found) == {"b"}
    with raises_code("api.params_twice", RequestError):
        engine.add_request("c", "x", SamplingParams(), sampling_params=SamplingParams())
    with raises_code("request.unsupported_name", NameAbsentError, owner="LLMEngine", name="add_lora"):
        engine.add_lora  # noqa: B018
    engine.shutdown()


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_async_generate_gives_outputs_by_their_kind(kind: RequestOutputKind) -> None:
    params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, output_kind=kind)

    async def read() -> list:
        async with AsyncLLM.from_engine(make_engine()) as llm:
            stream = llm.generate(request_id="x", prompt="Hello", sampling_params=params)
            return [output async for output in stream]

    outputs = asyncio.run(read())
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    (whole,) = LLM.from_engine(make_engine()).generate("Hello", params)
    tokens: list[list[int]] = [[], []]
    for output in outputs:
        for completion in output.outputs:
            added = completion.token_ids
            tokens[completion.index] = [*tokens[completion.index], *added] if kind == "delta" else added
    assert tokens == [completion.token_ids for completion in whole.outputs]
    assert len(outputs) == 1 or kind != "final_only"


@pytest.mark.parametrize(("kind", "sizes"), [("cumulative", [1, 2, 3]), ("delta", [1, 1, 1]), ("final_only", [3])])
def test_llm_engine_gives_outputs_by_their_kind(kind: str, sizes: list[int]) -> None:
    engine = LLMEngine.from_engine(make_engine())
    engine.add_request("x", "Hello", SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1, output_kind=kind))
    (outputs,) = step_all(engine).values()
    assert [len(output.outputs[0].token_ids) for output in outputs] == sizes
    assert [len(output.outputs[0].logprobs) for output in outputs] == sizes
    assert [output.outputs[0].finish_reason for output in outputs] == [None] * (len(sizes) - 1) + ["length"]
    engine.shutdown()


def test_output_kind_unknown_value_is_refused() -> None:
    with raises_code("value.not_one_of", RequestError, name="output_kind", value="whole"):
        SamplingParams(output_kind="whole")
    assert SamplingParams(output_kind="delta").output_kind is RequestOutputKind.DELTA


def test_generate_without_max_tokens_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    OPEN_ENDED_WARNED.clear()
    llm = LLM.from_engine(make_engine(max_model_len=32))
    llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=2))
    llm.chat([{"role": "user", "content": "x"}], SamplingParams(temperature=0.0))
    assert "max_tokens is not set" not in caplog.text
    for _ in range(2):
        llm.generate("Hello", SamplingParams(temperature=0.0))
    reported = [record for record in caplog.records if "max_tokens is not set" in record.getMessage()]
    assert [record.levelname for record in reported] == ["WARNING"]
    assert "up to 27 tokens" in reported[0].getMessage()


def test_cleanup_dist_env_takes_the_vllm_argument():
    assert cleanup_dist_env_and_memory(shutdown_ray=True) is None
