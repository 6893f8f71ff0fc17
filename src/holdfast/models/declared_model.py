"""DeclaredModel: what a model declares for planning, with a memo; also models that cannot run here; no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TypeVar, cast

from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ConfigError
from holdfast.kernels.packed_kernels import PieceShape, has_kernel
from holdfast.memory.on_disk import OnDisk
from holdfast.models.compressed_declaration import CompressedDeclaration
from holdfast.models.declaration import Declaration
from holdfast.models.declared_weights import (
    Review,
    Weight,
    WeightGroup,
    review_recipe,
    review_stored,
    stored_recipe,
    weight_groups,
)
from holdfast.models.decoder_declaration import DecoderDeclaration
from holdfast.models.grouped_readers import FAMILIES
from holdfast.models.latent_declaration import LatentDeclaration
from holdfast.models.packed_rows import PackedAccount, Schemes, account_for, cut_group
from holdfast.models.spec import ModelSpec
from holdfast.quant.formats import (
    COMPRESSED_FORMATS,
    COMPRESSED_NAMES,
    MLA_FORMATS,
    MLA_NAMES,
    KVFormat,
    formats_of,
    kv_format,
)
from holdfast.quant.weight_schemes import AS_STORED, EXPANDED, WeightRecipe, WeightScheme

_Made = TypeVar("_Made")


@dataclass(frozen=True)
class DeclaredModel:
    """A model as numbers, those of the whole model. Methods take a `Mesh` and answer for a rank."""

    name: str
    spec: ModelSpec | None
    """The decoder that runs; None if this version has none."""
    not_runnable: str | None
    """Reason why it cannot run."""
    max_position: int
    checkpoint_dtype: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """1 if all query heads share one vector per token."""
    head_dim: int
    """Elements stored per token: a key, or a latent with its rotated part."""
    declaration: Declaration
    stored: Mapping[str, WeightScheme] = field(default_factory=dict)
    """Quantized weights of the checkpoint, from its headers; empty if they have not been read."""
    open_weights: frozenset[str] = frozenset()
    """Other weights that a load may quantize: neither excluded nor left unquantized by the publisher."""
    on_disk: OnDisk | None = None
    """File contents by stored type, if headers have been read and store blocks (GGUF)."""
    packed: Mapping[str, Schemes | str] = field(default_factory=dict)
    """The scheme of each part of the weights that the checkpoint packs, or why one cannot stay packed, from its headers."""
    release: str = ""
    """How its name says that weights are stored, such as Q4_K_M, if no file was read."""
    unread_pattern: str | None = None
    """An exclusion pattern of the publisher that is not supported. With one, open weights are unknown."""
    keeps_latents: bool = False
    """Each token has one latent (MLA), with KV formats of its own."""
    is_compressed: bool = False
    """The cache is a window, and entries that stand for several tokens each, with formats of their own."""
    notes: tuple[str, ...] = ()
    """Sentences on what a plan of it leaves out or assumes."""
    typed: tuple[str, ...] = ()
    """Command-line words that name the model, if its name does not."""
    _memo: dict[object, object] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Memo of earlier results: a plan asks many times while it varies other sizes."""

    @property
    def has_learned_positions(self) -> bool:
        """Positions beyond `max_position` do not exist."""
        return self.declaration.rope_pairs(ALONE) == 0

    @property
    def num_streams(self) -> int:
        """Residual streams, all of which a stage sends to the next."""
        streams = None if self.spec is None else self.spec.streams
        return 1 if streams is None else streams.num_streams

    def remembered(self, key: tuple[object, ...], make: Callable[[], _Made]) -> _Made:
        """Return the memoized value for this key, or make it."""
        if key not in self._memo:
            self._memo[key] = make()
        return cast("_Made", self._memo[key])

    def first_layers(self, num_layers: int) -> "DeclaredModel | None":
        """Keep only the first layers; None if layers are not declared one by one, or none of these has pages."""
        declaration = self.declaration
        if not isinstance(declaration, DecoderDeclaration):
            return None
        spec = declaration.decoder.first_layers(num_layers)
        if spec.state is not None and len(spec.state.layers) == num_layers:
            return None  # pages are planned by layers that attend to tokens
        return replace(
            self,
            spec=None if self.spec is None else spec,
            num_layers=num_layers,
            declaration=declaration._replace(decoder=spec),
        )

    def check_ranks(self, mesh: Mesh) -> None:
        """Raise if these ranks cannot share layers, or there are fewer layers than stages."""
        if mesh.num_stages > self.num_layers:
            raise ConfigError(
                "families.too_many_stages", value=mesh.num_stages, model=self.name, layers=self.num_layers
            )
        if self.is_divisible(mesh):
            return
        if self.is_divisible(mesh.all_layers):
            reason = self.indivisible(mesh)
            raise ConfigError("families.indivisible_stages", value=mesh.num_stages, reason=reason)
        raise self._refusal(mesh, self.indivisible(mesh), AS_STORED)

    def check_blocks(self, mesh: Mesh, recipe: WeightRecipe) -> None:
        """Raise if ranks would cut a block of columns that shares a scale, by a scheme that a recipe gives."""
        reason = self._cut_block(mesh, recipe)
        if reason is not None:
            raise self._refusal(mesh, reason, recipe)

    def _refusal(self, mesh: Mesh, reason: str | None, recipe: WeightRecipe) -> ConfigError:
        """Return an error that lists the numbers of ranks that work."""

        def works(other: Mesh) -> bool:
            return self.is_divisible(other) and self._cut_block(other, recipe) is None

        option = f"tensor_parallel_size={mesh.tensor_size}" + " with experts by rank" * (mesh.expert_size > 1)
        sizes = [str(size) for size in range(1, 17) if works(_resized(mesh, size))]
        if mesh.expert_size == 1 and self.has_experts and works(replace(mesh, expert_size=mesh.tensor_size)):
            sizes.append("or enable_expert_parallel")
        fix = f"Try {', '.join(sizes)}." if sizes else "Leave pipeline_parallel_size out."
        return ConfigError("families.indivisible", option=option, reason=reason, fix=fix)

    @property
    def has_experts(self) -> bool:
        return self.spec is not None and self.spec.experts is not None

    def is_divisible(self, mesh: Mesh) -> bool:
        """Return True if so many ranks can share layers."""
        return self.indivisible(mesh) is None

    def indivisible(self, mesh: Mesh) -> str | None:
        """Return None, or what the ranks do not divide: sizes, or blocks of columns that share a stored scale."""
        reason = self.declaration.indivisible(mesh)
        if reason is not None or mesh.tensor_size == 1 or self.stored_recipe is None:
            return reason
        return self._cut_block(mesh, self.stored_recipe)

    def _cut_block(self, mesh: Mesh, recipe: WeightRecipe) -> str | None:
        """Return None, or a weight of which a rank's columns, or rows of one part, end within a block."""
        first = _resized(mesh.all_layers, mesh.tensor_size)
        if first.tensor_size == 1 or (recipe.scheme is None and recipe.packed == EXPANDED):
            return None

        def find() -> str | None:
            owns = self.remembered(("weights", first), lambda: self._stored_weights(first))
            for whole, own in zip(self.parameters(), owns, strict=True):
                form = own.form(self.checkpoint_dtype, recipe)
                reason = None if form is None else cut_group(form.rows, own.shape[-1], whole.shape[-1])
                if reason is not None:
                    return f"{own.name} would have {reason}, as it is packed"
                scheme = own.scheme(recipe)
                if scheme is None or not scheme.block_columns:
                    continue
                sides = [(-1, "columns", scheme.block_columns)]
                sides += [(-2, "rows", scheme.block_rows)] if not own.seam_rows and len(own.shape) == 2 else []
                for side, what, size in sides:
                    share, of = own.shape[side], whole.shape[side]
                    if share != of and share % size:
                        return f"{share} of {of} {what} of {own.name} cut a block of {size}, which share a scale"
            return None

        return self.remembered(("blocks", first, recipe), find)

    def parameters(self, mesh: Mesh = ALONE) -> tuple[Weight, ...]:
        """List every tensor that a rank holds, with its kind."""
        self.check_ranks(mesh)
        # All ranks of a stage but the last, which may have a shorter share of the vocabulary, hold the same shapes.
        if mesh.tensor_rank < mesh.tensor_size - 1:
            mesh = replace(mesh, tensor_rank=0, expert_rank=0)
        return self.remembered(("weights", mesh), lambda: self._stored_weights(mesh))

    def _stored_weights(self, mesh: Mesh) -> tuple[Weight, ...]:
        weights = self.declaration.weights(mesh)
        if self.stored:
            weights = tuple(weight._replace(native=self.stored.get(weight.model_name)) for weight in weights)
        if self.packed:
            weights = tuple(weight._replace(packed=self.packed.get(weight.model_name, ())) for weight in weights)
        return weights

    @property
    def stored_recipe(self) -> WeightRecipe | None:
        """Return the checkpoint's quantization recipe; None if it is unquantized."""
        return self.remembered(("stored",), lambda: stored_recipe(self.parameters()))

    def review_stored(self, wanted: WeightRecipe) -> WeightRecipe:
        """Return the recipe of a load from a quantized checkpoint. An impossible recipe raises."""
        return self.remembered(("stored", wanted), lambda: review_stored(self.parameters(), wanted, self.open_weights))

    def review_recipe(self, recipe: WeightRecipe) -> Review:
        """Return what a recipe does to this model. An impossible recipe raises."""
        return self.remembered(("review", recipe), lambda: review_recipe(self.parameters(), recipe))

    def packed_account(self, recipe: WeightRecipe) -> PackedAccount:
        """Return what a recipe does to the weights that the checkpoint packs."""

        def find() -> PackedAccount:
            forms = [(weight.kind, weight.form(self.checkpoint_dtype, recipe)) for weight in self.parameters()]
            return account_for([(kind, form) for kind, form in forms if form is not None], recipe)

        return self.remembered(("packed", recipe), find)

    def packed_shapes(self, recipe: WeightRecipe, mesh: Mesh = ALONE) -> tuple[PieceShape, ...]:
        """Return the shapes of a rank's packed parts."""

        def find() -> tuple[PieceShape, ...]:
            device = recipe.packed.device_kind
            forms = [(weight, weight.form(self.checkpoint_dtype, recipe)) for weight in self.parameters(mesh)]
            shapes = {
                PieceShape(rows.num_rows, weight.shape[-1], rows.scheme.row_group, has_kernel(rows.scheme, device))
                for weight, form in forms
                if form is not None
                for rows in form.rows
            }
            return tuple(sorted(shapes))

        return self.remembered(("packed shapes", recipe, mesh), find) if self.packed else ()

    def group_bytes(
        self, dtype: str, recipe: WeightRecipe = AS_STORED, mesh: Mesh = ALONE
    ) -> Mapping[str, WeightGroup]:
        """Return tensors and bytes in an arena, by group: embed, layers, experts, lm_head and so on."""
        key = ("groups", dtype, recipe, mesh)
        return self.remembered(key, lambda: weight_groups(self.parameters(mesh), dtype, recipe))

    def weight_bytes(self, dtype: str, recipe: WeightRecipe = AS_STORED, mesh: Mesh = ALONE) -> int:
        """Return the bytes of the arena that holds every parameter of a rank."""
        groups = self.group_bytes(dtype, recipe, mesh)
        return sum(group.num_bytes for group in groups.values())

    def kv_bytes_per_token(self, format: KVFormat | str, mesh: Mesh = ALONE) -> Fraction:
        """Return the exact bytes, a fraction because a row of a compressed cache stands for several tokens."""
        found = self.check_format(format)
        self.check_ranks(mesh)
        rows = self.declaration.cache_rows(found, mesh)
        return sum((row.bytes_per_token for row in rows), Fraction(0))

    def kv_bytes_per_sequence(self, format: KVFormat | str, mesh: Mesh = ALONE) -> int:
        """Return the bytes of a sequence that do not depend on its length, such as windows; 0 in ordinary models."""
        found = self.check_format(format)
        self.check_ranks(mesh)
        return self.declaration.sequence_bytes(found, mesh)

    def check_format(self, format: KVFormat | str, option: str = "kv_cache_dtype") -> KVFormat:
        """Return the format. If this model's cache does not support it, raise an error that names the option."""
        found = kv_format(format) if isinstance(format, str) else format
        given, known = found.name, formats_of(self.keeps_latents, self.is_compressed)
        names = COMPRESSED_NAMES if self.is_compressed else MLA_NAMES if self.keeps_latents else {}
        if found.name in names:
            found = known[names[found.name]]
        reason = self.declaration.unsupported_format(found)
        if found.has_exponents and not self.is_compressed:
            reason = f"{found.name} keeps vectors of compressed attention, and this model has none"
        elif found.is_latent and found.name not in known:
            reason = f"{found.name} keeps latents (MLA), and this model has none"
        if reason is not None:
            works = [
                name
                for name in ("bfloat16", "fp8", *(COMPRESSED_FORMATS if self.is_compressed else MLA_FORMATS))
                if name in known and self.declaration.unsupported_format(known[name]) is None
            ]
            raise ConfigError("families.format", option=option, value=given, reason=reason, works=" or ".join(works))
        return found


def _resized(mesh: Mesh, size: int) -> Mesh:
    """Return such a mesh with `size` ranks to a layer."""
    is_exact, expert_size = mesh.is_exact and size > 1, size if mesh.expert_size > 1 else 1
    return replace(mesh, tensor_rank=0, tensor_size=size, expert_rank=0, expert_size=expert_size, is_exact=is_exact)


def declare_decoder(
    spec: ModelSpec, name: str, native: str | None = None, expert_native: str | None = None
) -> DeclaredModel:
    """Declare a decoder that runs: its parameters are those that an engine loads.

    `native` is the checkpoint's scheme of matrices, `expert_native` that of experts if it differs.
    """
    kind = DecoderDeclaration if spec.latent is None else LatentDeclaration
    if spec.compressed is not None:
        kind = CompressedDeclaration
    family = FAMILIES[spec.architecture]
    notes = draft_notes(spec.num_draft_layers)
    if words := family.unread_words:
        notes = (f"the text model alone is planned and run: weights for {words} are left unread", *notes)
    return replace(declare_named(name, kind(spec, family.names, native, expert_native), None), notes=notes)


def draft_notes(num_layers: int) -> tuple[str, ...]:
    """Return a plan's note on layers that draft tokens; empty without any."""
    words = f"layers that draft tokens (multi-token prediction: {num_layers}) are neither planned nor loaded"
    return (words,) if num_layers else ()


def declare_named(name: str, declaration: DecoderDeclaration, not_runnable: str | None) -> DeclaredModel:
    spec = declaration.decoder
    return DeclaredModel(
        name=name,
        spec=spec if not_runnable is None else None,
        not_runnable=not_runnable,
        max_position=spec.max_position,
        checkpoint_dtype=spec.checkpoint_dtype,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        declaration=declaration,
        keeps_latents=spec.latent is not None,
        is_compressed=spec.compressed is not None,
    )
