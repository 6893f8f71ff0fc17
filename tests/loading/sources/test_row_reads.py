from holdfast.loading.sources.safetensors import SafetensorsSource
from holdfast.loading.sources.source import RowRead, TogetherSource
from loading.made_up_source import MadeUpSource


def test_a_read_is_the_arguments_of_read_into():
    out = memoryview(bytearray(4))
    read = RowRead("t", 1, 2, out, (0, 1))
    calls = []
    (lambda name, row_start, row_end, out, columns: calls.append((name, row_start, row_end, out, columns)))(*read)
    assert calls == [("t", 1, 2, out, (0, 1))]


def test_which_sources_take_several_at_once():
    assert isinstance(SafetensorsSource([]), TogetherSource)
    assert not isinstance(MadeUpSource(), TogetherSource)
