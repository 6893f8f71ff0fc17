"""Parts of attention kernels in Gluon that read tile lists: a step's tiles, a tile's fields, programmatic dependent launch."""

from holdfast.kernels.attention.split_kv import NUM_TILE_FIELDS
from holdfast.kernels.triton_compat import constexpr, gl, gluon_jit, kernel_constant

WAIT = kernel_constant("griddepcontrol.wait; // $0")
LAUNCH_DEPENDENTS = kernel_constant("griddepcontrol.launch_dependents; // $0")


@gluon_jit
def wait_for_kernels_before():
    gl.inline_asm_elementwise(WAIT, "=r", [], gl.int32, False, 1)


@gluon_jit
def launch_dependents():
    gl.inline_asm_elementwise(LAUNCH_DEPENDENTS, "=r", [], gl.int32, False, 1)


@gluon_jit
def first_tile(p_tiles, LARGE: constexpr):
    """Return the index of a step's first small or large tile, and their number."""
    num_small = gl.load(p_tiles)
    num_tiles = num_small
    first = 1
    if LARGE:
        num_tiles = gl.load(p_tiles + 1)
        first = 1 + num_small
    return first, num_tiles


@gluon_jit
def load_tile(p_tiles, i_tile):
    """Like `load_tile` of split_kv.py, in Gluon."""
    p_tile = p_tiles + i_tile * NUM_TILE_FIELDS
    table_row, row, num_rows, position = gl.load(p_tile), gl.load(p_tile + 1), gl.load(p_tile + 2), gl.load(p_tile + 3)
    low, high = gl.load(p_tile + 4), gl.load(p_tile + 5)
    first_partial, num_splits = gl.load(p_tile + 6), gl.load(p_tile + 7)
    return table_row, row, num_rows, position, low, high, first_partial, num_splits
