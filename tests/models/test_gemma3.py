"""Gemma 3: settings in every spelling, folders with images, windows of any width, chunks, prefixes and preemption against transformers."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.config import Limits
from holdfast.errors import ModelError
from holdfast.loading.declared import open_declared
from holdfast.loading.model_files import open_model
from holdfast.models.grouped_readers import read_spec
from holdfast.models.spec import ModelSpec, RopeSpec
from holdfast.request.sampling_params import SamplingParams
from kernels.exactness import require_native, same_bits
from loading.tiny_models import FAMILIES, VOCAB, save_tiny
from models.test_decoder import judge, make_drive, make_requests, theirs_logits
from models.test_decoder_workspace import make_step
from runner.drive import Drive, LoadedModel, Request, Rig, load_model

TINY = FAMILIES["gemma3"][1]
TEXT: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
IMAGES: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "hidden_size": 64},
    "vision_config": TOWER,
}


def read(**settings: Any) -> ModelSpec:
    return read_spec(TEXT | settings)


def test_read_spec_gemma3_defaults_of_absent_keys() -> None:
    spec = read()
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (262208, 2304, 9216)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (26, 8, 4, 256)
    assert spec.sliding_windows == tuple(4096 if (layer + 1) % 6 else None for layer in range(26))
    assert (spec.rope, spec.local_rope) == (RopeSpec(1_000_000.0), RopeSpec(10_000.0))
    assert (spec.attention_scale, spec.embedding_scale) == (1 / 16, 48.0)
    assert (spec.norm_offset, spec.float32_norms, spec.has_output_norms, spec.qk_norm) == (1.0, True, True, True)
    assert (spec.activation, spec.tied_embeddings, spec.max_position) == ("gelu_tanh", True, 131072)
    assert (spec.attention_softcap, spec.logit_softcap, spec.qkv_bias, spec.o_bias) == (None, None, False, False)


def test_rotations_in_both_spellings() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = read(rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling=scaling)
    new = read(
        rope_parameters={GLOBAL: scaling | {"rope_theta": 5e5}, LOCAL: {"rope_type": "default", "rope_theta": 2e4}}
    )
    assert old == new
    assert old.rope == RopeSpec(5e5, "linear", factor=8.0)
    assert old.local_rope == RopeSpec(2e4)
    assert old.max_position == 131072, "the longest context is stretched already"
    assert [old.layer_rope(layer) for layer in (0, 5)] == [old.local_rope, old.rope]
    assert read(rope_parameters={GLOBAL: None, LOCAL: None}) == read()


def test_windows_in_every_spelling() -> None:
    wide = dict.fromkeys(range(4), 8) | {1: None, 3: None}
    for settings in (
        {"sliding_window_pattern": 2},
        {"_sliding_window_pattern": 2},
        {"layer_types": [LOCAL, GLOBAL, LOCAL, GLOBAL]},
        {"layer_types": [LOCAL, GLOBAL, LOCAL, GLOBAL], "sliding_window_pattern": 3},
    ):
        assert read(num_hidden_layers=4, sliding_window=8, **settings).sliding_windows == tuple(wide.values())
    assert read(num_hidden_layers=2, layer_types=[GLOBAL] * 2, sliding_window=None).sliding_windows == ()
    assert read(num_hidden_layers=2, layer_types=[GLOBAL] * 2).local_rope is None
    assert read(num_hidden_layers=2, sliding_window=1).sliding_windows == (1, 1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too few kinds": ({"num_hidden_layers": 3, "layer_types": [LOCAL]}, "one entry for each of 3 layers"),
    "another kind": ({"num_hidden_layers": 1, "layer_types": ["chunked_attention"]}, "chunked_attention"),
    "no window": ({"sliding_window": None}, "sliding_window"),
    "no window for a listed layer": (
        {"num_hidden_layers": 1, "layer_types": [LOCAL], "sliding_window": None},
        "a sliding_window",
    ),
    "window 0": ({"sliding_window": 0}, "a whole number from 1"),
    "window below": ({"sliding_window": -4}, "a whole number from 1"),
    "window of text": ({"sliding_window": "8"}, "a whole number from 1"),
    "pattern 0": ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
    "cap of scores 0": ({"attn_logit_softcapping": 0}, "a number above 0"),
    "cap of logits below": ({"final_logit_softcapping": -30.0}, "a number above 0"),
    "cap that is no number": ({"final_logit_softcapping": float("nan")}, "a number above 0"),
    "cap of text": ({"attn_logit_softcapping": "50"}, "a number above 0"),
    "kind of rotation": ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
    "kind of a local rotation": ({"rope_parameters": {LOCAL: {"rope_type": "spiral"}}}, "spiral"),
    "rotation of other layers": ({"rope_parameters": {"chunked_attention": {}}}, "chunked_attention"),
    "rotation that is flat": ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta"),
    "base of a local rotation": ({"rope_local_base_freq": 0}, "rope_local_base_freq"),
    "scale": ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    "both ways": ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "activation": ({"hidden_activation": "mish"}, "hidden_activation"),
    "heads": ({"num_key_value_heads": 3}, "num_key_value_heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_read_spec_gemma3_invalid_settings_refused_in_one_line(case: str) -> None:
    settings, word = REFUSED[case]
    for config in (TEXT | settings, IMAGES | {"text_config": IMAGES["text_config"] | settings}):
        with pytest.raises(ModelError) as caught:
            read_spec(config)
        assert word in str(caught.value)
        assert "\n" not in str(caught.value)


def test_read_spec_gemma3_reads_text_config_of_image_model() -> None:
    spec = read_spec(IMAGES | {"torch_dtype": "bfloat16"})
    assert (spec.architecture, spec.family, spec.hidden_size) == ("Gemma3ForConditionalGeneration", "gemma3", 64)
    assert (spec.checkpoint_dtype, spec.tied_embeddings, spec.num_layers) == ("bfloat16", True, 26)
    assert not read_spec(IMAGES | {"tie_word_embeddings": False}).tied_embeddings
    assert read_spec({key: value for key, value in IMAGES.items() if key != "architectures"}) == read_spec(IMAGES)
    assert read_spec(IMAGES | {"text_config": None}).hidden_size == read().hidden_size
    with pytest.raises(ModelError, match="text_config"):
        read_spec(IMAGES | {"text_config": "gemma3_text"})
    with pytest.raises(ModelError, match=r"text_config\.model_type"):
        read_spec(IMAGES | {"text_config": {"model_type": "llama"}})


@cache
def tiny(kinds: tuple[str, ...] = (), **overrides: Any) -> tuple[Any, LoadedModel]:
    """transformers' model and ours, from the same files."""
    if kinds:
        overrides |= {"num_hidden_layers": len(kinds), "layer_types": list(kinds)}
    with TemporaryDirectory() as folder:
        return save_tiny("gemma3", folder, **overrides), load_model(Path(folder))


def ask(theirs: Any, ours: LoadedModel, lengths=(33,), max_rows: int = 128, page_tokens: int = 4) -> None:
    require_native()
    requests = make_requests(lengths)
    drive = make_drive(ours, "native_paged", max_rows, page_tokens)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)


@pytest.mark.parametrize("window", [*(pytest.param(one, marks=pytest.mark.slow) for one in (1, 64)), 7, 500])
def test_windows_of_any_width(window: int) -> None:
    """No multiple of a page, one token, several pages, and more than the longest context."""
    theirs, ours = tiny(sliding_window=window)
    ask(theirs, ours, (1, 33, 90), max_rows=24)
    ask(theirs, ours, (33, 90), page_tokens=16)


@pytest.mark.parametrize("head_dim", [16, 64, 256])
def test_heads_of_any_width(head_dim: int) -> None:
    ask(*tiny(head_dim=head_dim, query_pre_attn_scalar=head_dim))


def test_logits_that_are_capped() -> None:
    theirs, ours = tiny(final_logit_softcapping=4.0)
    ask(theirs, ours)
    assert 3 < float(theirs_logits(theirs, tuple(range(40))).abs().max()) < 4


@pytest.mark.parametrize("backend", ["native_paged", "torch_paged"])
def test_scores_that_are_capped(backend: str, monkeypatch) -> None:
    """transformers keeps the setting and does not pass it on: its attention takes the cap as an argument."""
    if backend == "native_paged":
        require_native()
    else:
        monkeypatch.setattr("holdfast.kernels.native_library.native_library", lambda: None)
    cap = 0.5
    theirs, ours = tiny(attn_logit_softcapping=cap)
    theirs.set_attn_implementation("eager")
    requests = make_requests((33, 64))
    drive = make_drive(ours, backend, 24)
    drive.run(requests)
    for request in requests:
        ids = torch.tensor([[*request.prompt, *request.output]])
        with torch.no_grad():
            expected, plain = (theirs(ids, **kwargs).logits[0, :-1] for kwargs in ({"softcap": cap}, {}))
        computed = torch.stack([row for _, row in sorted(drive.logits(request).items())])
        assert float((computed - expected).abs().max()) < 1e-4
        assert float((plain - expected).abs().max()) > 0.1, "a cap that changes nothing"
        assert request.output == expected[len(request.prompt) - 1 :].argmax(-1).tolist()


def test_biases_an_own_head_and_layers_without_windows() -> None:
    ask(*tiny(attention_bias=True, tie_word_embeddings=False))
    ask(*tiny((GLOBAL, GLOBAL)))


@pytest.mark.parametrize(
    "chunks",
    [(1, 2, 7, 8, 9, 16, 31, 32, 33), pytest.param(range(1, 34), marks=pytest.mark.slow)],
    ids=["some", "every"],
)
def test_logits_match_at_every_chunk_size(chunks) -> None:
    """The prompt in pieces of every length: the same tokens, and the same bits of logits."""
    require_native()
    theirs, ours = tiny()
    found = []
    for max_rows in chunks:
        request = Request(list(range(3, 36)), 8, params=SamplingParams(temperature=0.0, prompt_logprobs=0))
        drive = make_drive(ours, "native_paged", max_rows)
        drive.run([request])
        found.append((request.output, drive.logits(request)))
    expected = theirs_logits(theirs, (*range(3, 36), *found[0][0]))[:-1]
    assert found[0][0] == expected[32:].argmax(-1).tolist()
    for output, logits in found:
        assert output == found[0][0]
        assert all(same_bits(logits[position], row) for position, row in found[0][1].items())
    assert max(float((row - expected[place]).abs().max()) for place, row in found[0][1].items()) < 1e-4


def test_prefix_hit_and_miss() -> None:
    require_native()
    theirs, ours = tiny()
    drive = make_drive(ours, "native_paged", 24)
    prompt = list(range(3, 60))
    first, again, other = (Request(list(ids), 12) for ids in (prompt, prompt, [9, *prompt[1:]]))
    for request in (first, again, other):
        drive.run([request])
        expected = theirs_logits(theirs, (*request.prompt, *request.output))[len(prompt) - 1 : -1]
        assert request.output == expected.argmax(-1).tolist()
    assert again.sequence is not None
    assert again.sequence.num_cached_tokens > 8
    assert other.sequence is not None
    assert other.sequence.num_cached_tokens == 0
    alike = [drive.logits(request) for request in (first, again)]
    assert all(same_bits(row, alike[0][position]) for position, row in alike[1].items())


def test_preemption_at_every_position() -> None:
    """After every step in turn: the answer is the one of a request that was left alone."""
    require_native()
    _, ours = tiny()
    answers = []
    for stop in range(20):
        request = Request(list(range(3, 24)), 12)
        drive = make_drive(ours, "native_paged", 5)
        complete, steps = drive.scheduler.complete, iter(range(1000))

        def book(*arguments: Any, drive=drive, complete=complete, steps=steps, stop=stop) -> None:
            complete(*arguments)
            if next(steps) == stop - 1:
                drive.scheduler.preempt_last()

        drive.scheduler.complete = book  # type: ignore[method-assign]
        drive.run([request])
        assert request.sequence is not None
        answers.append((request.output, request.sequence.num_preemptions))
    assert [preemptions for _, preemptions in answers] == [0, *[1] * 16, *[0] * 3]
    assert all(output == answers[0][0] for output, _ in answers)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16
def test_bfloat16_keeps_norms_in_float32() -> None:
    with TemporaryDirectory() as folder:
        theirs = save_tiny("gemma3", folder, dtype="bfloat16")
        ours = load_model(Path(folder), "bfloat16")
    dtypes = {name: getattr(weight, "dtype", None) for name, weight in ours.weights.items()}
    norms = [dtype for name, dtype in dtypes.items() if "norm" in name]
    assert norms == [torch.float32] * (6 * 4 + 1)
    assert dtypes["embed.weight"] == torch.bfloat16
    drive = Drive(Rig(ours, "torch_paged", Limits(4, 24, 160, 4), 160, "bfloat16", "bfloat16"), 160)
    (request,) = make_requests((90,))
    drive.run([request])
    expected = theirs_logits(theirs, (*request.prompt, *request.output))
    errors = [float((row - expected[place]).abs().max()) for place, row in drive.logits(request).items()]
    assert max(errors) < 0.5


def test_embeddings_are_scaled_by_a_rounded_number() -> None:
    """The root of 72 is 8.485, and 8.5 in bfloat16."""
    with TemporaryDirectory() as folder:
        save_tiny("gemma3", folder, dtype="bfloat16", hidden_size=72)
        ours = load_model(Path(folder), "bfloat16")
    rig = Rig(ours, "torch_paged", Limits(4, 24, 160, 4), 160, "bfloat16", "bfloat16")
    step = make_step(9, groups=rig.groups)
    batch = rig.runner.buffers.fill(step, [8], 9, 1)
    embedded = ours.weights["embed.weight"][batch.token_ids_T]
    assert torch.equal(rig.decoder.embed(batch).x_TH, embedded * torch.tensor(8.5, dtype=torch.bfloat16))


def save_images(folder: Path, prefixes: tuple[str, str, str]) -> Any:
    """A tiny model with a tower; its text part, tower and head go by these prefixes."""
    import transformers

    theirs = save_tiny("gemma3", folder / "text", tie_word_embeddings=False)
    config = json.loads((folder / "text" / "config.json").read_text())
    text = {key: value for key, value in config.items() if key != "architectures"}
    outer = {"vocab_size": VOCAB, "tie_word_embeddings": False, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(IMAGES | {"text_config": text} | outer))
    whole = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=text, vision_config=TOWER | {"model_type": "siglip_vision_model"}, tie_word_embeddings=False
        )
    )
    seen = {name: value for name, value in whole.state_dict().items() if "language_model" not in name}
    tensors = {name.replace("model.", prefixes[1], 1): value for name, value in seen.items() if "lm_head" not in name}
    for name, value in load_file(folder / "text" / "model.safetensors").items():
        prefix = prefixes[2] if name.startswith("lm_head") else prefixes[0]
        tensors[prefix + name.removeprefix("model.")] = value
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return theirs, len(seen) - 1


@pytest.mark.parametrize(
    "prefixes",
    [("language_model.model.", "", "language_model."), ("model.language_model.", "model.", "")],
    ids=["older", "newer"],
)
def test_load_model_gemma3_skips_image_tensors(prefixes: tuple[str, str, str], tmp_path: Path, caplog) -> None:
    theirs, num_unread = save_images(tmp_path, prefixes)
    with caplog.at_level("INFO"):
        ours = load_model(tmp_path)
    assert f"skipping {num_unread} tensors of {tmp_path} for images" in caplog.text
    ask(theirs, ours)
    planned = {weight.name for weight in open_declared(str(tmp_path)).parameters()}
    assert planned == set(ours.weights)
    opened = open_model(str(tmp_path), "dummy")
    assert len(opened.source.entries) == len(load_file(tmp_path / "text" / "model.safetensors"))
    opened.source.close()


def test_ends_of_text_in_every_place(tmp_path: Path) -> None:
    """generation_config.json, then the whole model's settings, then what transformers assumes."""
    (tmp_path / "config.json").write_text(json.dumps(IMAGES))
    assert open_model(str(tmp_path), "dummy").generation.eos_token_ids == (1,)
    (tmp_path / "config.json").write_text(json.dumps(IMAGES | {"eos_token_id": [1, 106]}))
    assert open_model(str(tmp_path), "dummy").generation.eos_token_ids == (1, 106)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 107], "bos_token_id": 5}))
    found = open_model(str(tmp_path), "dummy").generation
    assert (found.eos_token_ids, found.bos_token_id) == ((1, 107), 5)
