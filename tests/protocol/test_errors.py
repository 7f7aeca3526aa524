"""The tree of errors is the one that its file draws."""

from protocol import errors


def test_the_drawn_tree_is_the_real_one():
    drawn = [
        (line.index(word), word)
        for line in errors.__doc__.splitlines()
        for word in line.replace("│", " ").replace("├──", "   ").replace("└──", "   ").split()[:1]
        if word.endswith("Error")
    ]
    above: list[tuple[int, str]] = []
    for indent, word in drawn:
        above = [(at, name) for at, name in above if at < indent]
        if above:
            assert getattr(errors, word).__bases__ == (getattr(errors, above[-1][1]),), word
        above.append((indent, word))
    assert {word for _, word in drawn} == {name for name in vars(errors) if name.endswith("Error")}


def test_every_leaf_has_a_reason_of_its_own():
    leaves = [t for t in vars(errors).values() if isinstance(t, type) and not t.__subclasses__()]
    assert len({leaf.reason for leaf in leaves}) == len(leaves)


def test_the_place_grows_from_within():
    error = errors.OutOfRangeError("7 is too much", "[2]")
    error.within("spans")
    error.within("group")
    assert str(error) == "group.spans[2]: 7 is too much"
