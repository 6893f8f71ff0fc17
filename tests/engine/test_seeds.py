from holdfast.engine.admission import derive_seed


def test_derived_seeds_are_64_bits_and_stay_what_they_are():
    """A change here changes what every seeded request says."""
    assert [derive_seed(0, 0), derive_seed(0, 1), derive_seed(2**64 - 1, 127)] == [
        0xA706DD2F4D197E6F,
        0xB382A305F4414F5E,
        0xA3131552F009BDED,
    ]
    assert all(0 <= derive_seed(seed, index) < 2**64 for seed in (0, 1, 2**64 - 1) for index in range(200))


def test_neighbouring_seeds_and_indices_do_not_meet():
    """seed + index would: completion 1 of seed 0 would be completion 0 of seed 1."""
    derived = {derive_seed(seed, index) for seed in range(300) for index in range(128)}
    assert len(derived) == 300 * 128


def test_every_bit_depends_on_both():
    for change in (lambda bit: (5 ^ (1 << bit), 7), lambda bit: (5, 7 ^ (1 << bit))):
        for bit in range(40):
            flipped = (derive_seed(5, 7) ^ derive_seed(*change(bit))).bit_count()
            assert 12 <= flipped <= 52
