"""`holdfast plan`: memory and speed of a model on any device, present or not; no torch."""

from dataclasses import replace
from typing import NamedTuple

from holdfast.cli.layout import Line
from holdfast.cli.options import Given, read_choice, read_count
from holdfast.cli.plan_commands import ONE_SEQUENCE, PURPOSES, Purpose
from holdfast.cli.plan_view import CANNOT_START, DOES_NOT_FIT, FITS, Beside, sweep, view_of
from holdfast.cli.tables import plan_lines, show, sweep_lines
from holdfast.cli.terminal import MAX_PATH, dumps, write_answer, write_line
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, shown
from holdfast.loading.declared import declare_file, open_declared
from holdfast.loading.hub.names import parse_hub_name
from holdfast.loading.locate import locate_config
from holdfast.loading.release_names import find_release
from holdfast.memory.devices import find_gpu, find_gpus
from holdfast.memory.sizes import UNITS, parse_bytes
from holdfast.models.catalogue import CATALOGUE, SAME, is_known, stored_as
from holdfast.models.declared_model import DeclaredModel
from holdfast.planning.alternatives import layers_note, shortest_useful
from holdfast.planning.fit import try_fit
from holdfast.planning.kv_ladder import choose_kv
from holdfast.planning.ranks import RankPlans, check_ranks, sums_exactly, worst_request
from holdfast.planning.resolve import PlanRequest, resolve
from holdfast.planning.target import Target, cpu_target, gpu_target, memory_target

EXIT_CODES = {FITS: 0, DOES_NOT_FIT: 1, CANNOT_START: 3}
"""Exit codes by status; 2 means a wrong command line."""
LEAST_BYTES = 2**20
"""Minimum memory; a smaller number lacks a unit."""


class PlanOptions(NamedTuple):
    """Options of this command alone."""

    model: str | None = None
    gpu: str | None = None
    memory: str | None = None
    tensor_parallel_size: str | None = None
    as_json: bool = False
    sweep: bool = False
    owners: bool = False
    purpose: str | None = None
    html: str | None = None
    list_names: bool = False
    model_config: str | None = None
    parameters: str | None = None


def plan(options: PlanOptions, engine: Given) -> int:
    """Print a plan and return the exit code. All options are checked first."""
    if options.list_names:
        from holdfast.cli.plan_names import show_names

        show_names(as_json=options.as_json)
        return 0
    html = None
    if options.html is not None:
        from holdfast.cli.page import page_file

        html = page_file(options.html, "--html")
    request, ranks, purpose, beside = read_plan(options, engine)
    view = view_of(request, options.model, ranks, purpose, beside)
    cells = sweep(request) if options.sweep or html is not None else ()
    if html is not None:
        from holdfast.cli.page import plan_page, write_page

        write_page(html, plan_page(view, cells))
        if not options.as_json:
            write_line(f"page written to {shown(str(html), MAX_PATH)[1:-1]}")
    named, notes = name_notes(options, request), request.declared.notes
    if request.declared.is_compressed and not view.fits:
        # Even the smallest exceeds most GPUs.
        notes += tuple(filter(None, (layers_note(request),)))
    if options.gpu is None and options.memory is None:
        from holdfast.cli.present_gpu import no_device_note

        notes += (no_device_note(),)
    if options.as_json:
        record = view.as_dict() | {"notes": [*named, *notes]}
        record |= {"sweep": [cell.as_dict() for cell in cells]} if options.sweep else {}
        write_answer(f"{dumps(record, indent=1)}\n")
    else:
        verdict, *rest = plan_lines(view, has_all_owners=options.owners)
        lines = [verdict, *(Line(f"note: {note}", "dim") for note in named), *rest]
        if options.sweep:
            lines += [Line(""), *sweep_lines(cells, request.target.name)]
        lines += [Line("")] * bool(notes) + [Line(note, "dim") for note in notes]
        show(lines)
    return EXIT_CODES[view.status]


class Planned(NamedTuple):
    """A checked request."""

    request: PlanRequest
    """The request of the rank with the fewest pages."""
    ranks: RankPlans | None
    """All plans, if there are several ranks and every one fits."""
    purpose: Purpose
    beside: Beside


def read_plan(options: PlanOptions, engine: Given) -> Planned:
    """Check the options, then find the model.

    Without --for a plan has the default number of sequences, or one if only that fits.
    """
    purpose: Purpose | None = None if options.purpose is None else read_choice("--for", options.purpose, PURPOSES)
    config = EngineConfig.from_options(**engine)
    target = read_target(options)
    typed_ranks = _typed_ranks(options, config.pipeline_parallel_size)
    ranks = read_count(typed_ranks)
    declared = _declared(options, config.revision)
    # "auto" reads as None; EngineConfig refuses the text.
    config = replace(config, tensor_parallel_size=typed_ranks if ranks is None else ranks)
    if config.max_num_seqs is not None:
        return Planned(*place(config, declared, target), purpose or "serve", Beside())
    one = replace(config, max_num_seqs=ONE_SEQUENCE)
    if purpose in ("chat", "run"):
        return Planned(*place(one, declared, target), purpose, Beside())
    request, all_ranks = place(config, declared, target)
    chat, chat_ranks = place(one, declared, target)
    if try_fit(resolve(request)) is not None:
        return Planned(request, all_ranks, "serve", Beside(chat=chat))
    fit = try_fit(resolve(chat)) if purpose is None else None
    if fit is None or fit.resolved.limits.max_model_len < shortest_useful(chat):
        return Planned(request, all_ranks, "serve", Beside())
    return Planned(chat, chat_ranks, "chat", Beside(many=request))


def place(config: EngineConfig, declared: DeclaredModel, target: Target) -> tuple[PlanRequest, RankPlans | None]:
    """Return the request of the rank with the fewest pages, and all plans if every one of several ranks fits."""
    if config.tensor_parallel_size * config.pipeline_parallel_size == 1:
        check_ranks(config, declared)
        return choose_kv(PlanRequest(config, declared, target)), None
    if (
        target.kind == "cuda"
        and config.tensor_parallel_size > 1
        and sums_exactly(config)
        and not declared.is_compressed
    ):
        config = replace(config, batch_invariant=True)  # a GPU requires it, and the printed command includes it
    return worst_request(config, declared, target)


def _declared(options: PlanOptions, revision: str | None) -> DeclaredModel:
    """Find the model by name or path, read a config.json alone, or estimate from a number of parameters."""
    if options.parameters is None:
        if options.model_config is None:
            return open_declared(options.model, revision)
        return declare_file(options.model_config, options.model)
    if options.model_config is not None:
        raise ConfigError("cli.exclusive", first="--config", second="--parameters", reason="both give the size")
    if options.model is not None and is_known(options.model):
        raise ConfigError("cli.model_is_known", model=options.model)
    from holdfast.models.blueprints.estimate import declare_estimate

    return declare_estimate(options.parameters, options.model)


def _typed_ranks(options: PlanOptions, num_stages: int) -> str:
    """Return the tensor-parallel size as typed, or from a GPU name such as 2x4090; each stage has its own GPUs."""
    num_gpus = 1 if options.gpu is None else find_gpus(options.gpu).num_gpus
    typed = options.tensor_parallel_size
    if typed is None and num_gpus % num_stages == 0:
        return str(num_gpus // num_stages)
    if num_gpus == 1:
        return "1" if typed is None else typed
    ranks = 1 if typed is None else read_count(typed)
    if not isinstance(ranks, int) or ranks * num_stages != num_gpus:
        option = "--pipeline-parallel-size" if typed is None else "--tensor-parallel-size"
        second = f"{option} {num_stages if typed is None else shown(typed)[1:-1]}"
        first = f"--gpu {shown(options.gpu)[1:-1]}"
        raise ConfigError("cli.exclusive", first=first, second=second, reason="both give the number of GPUs")
    return str(ranks)


def name_notes(options: PlanOptions, request: PlanRequest) -> tuple[str, ...]:
    """List the assumptions made for an incomplete model name."""
    gpu_note = None if options.gpu is None else find_gpus(options.gpu).note
    notes = () if gpu_note is None else (f"--gpu {gpu_note}",)
    # The catalogue has shapes, not the stored format of a release.
    if options.model is None or request.declared.typed or request.declared.name not in (*CATALOGUE, *SAME):
        return notes
    stored, unread = stored_as(options.model), _unread(options.model, request.config.revision)
    if stored is None and not unread:
        return notes
    resolved = resolve(request)
    scheme = resolved.recipe.scheme
    advice = "pass the file or the folder for what it holds"
    if stored is not None and stored.scheme and scheme is None:
        advice = f"add --quantization {stored.scheme} for about as few bits, or {advice}"
    weights = resolved.dtype if scheme is None else scheme.name
    release = find_release(options.model) if request.declared.release and scheme is None else None
    if release is not None:
        weights = f"{release.title}, {'as llama.cpp mixes it' if release.mix else 'with the usual settings'}"
        advice = "pass the file or the folder for what it holds"
    planned = f"{request.declared.name} is planned with weights in {weights}"
    if not unread:
        assert stored is not None, "a name that says nothing has no note"
        if release is not None:
            return (*notes, f"{planned}, from the catalogue's figures: {advice}")
        return (*notes, f"{planned}, not {stored.word}: {advice}")
    was = "was" if len(unread) == 1 else "were"
    return (*notes, f"{planned}, from the catalogue's figures; {' and '.join(unread)} {was} not checked: {advice}")


def _unread(model: str, revision: str | None) -> list[str]:
    """List the parts of a Hub name that could not be checked because the repository is not cached."""
    name = parse_hub_name(model)
    if locate_config(model, revision) is not None:
        return []
    parts = {"revision": revision} if name is None else {"revision": revision or name.revision}
    if name is not None:
        parts = {"tag": name.tag, "file": name.file} | parts
    return [f"{what} {shown(value)[1:-1]}" for what, value in parts.items() if value]


def read_target(options: PlanOptions) -> Target:
    """Read the device to plan for."""
    if options.gpu is not None and options.memory is not None:
        raise ConfigError("cli.exclusive", first="--gpu", second="--memory", reason="both give the memory")
    if options.gpu is not None:
        if _is_size(options.gpu):
            typed = options.gpu.strip()
            size = typed if typed[-1:].isalpha() else f"{typed}GiB"
            raise ConfigError("cli.gpu_is_size", value=typed, size=size)
        return gpu_target(find_gpu(options.gpu))
    if options.memory is None:
        return cpu_target()
    num_bytes = parse_bytes(options.memory, "memory")
    if num_bytes < LEAST_BYTES:
        size = options.memory.strip()
        nearest = f"{size}GiB" if not size[-1:].isalpha() else "24GiB"
        raise ConfigError("cli.little_memory", value=size, num_bytes=num_bytes, nearest=nearest)
    return memory_target(num_bytes)


def _is_size(text: str) -> bool:
    number = text.strip().lower().rstrip("bgikmt")
    unit = text.strip().lower().removeprefix(number)
    # Four digits name a card, such as 4090, or 4090m for a laptop.
    is_number = unit in UNITS and number.strip().replace(".", "", 1).isdecimal()
    return is_number and (unit not in ("", "m") or float(number) < 1000)
