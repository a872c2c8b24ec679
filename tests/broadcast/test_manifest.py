"""The manifest's parser against valid, damaged and invented manifests; and chains of deltas: the
cheapest way to a version, and which versions are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broadcast.assemble import MAX_LINKS, Chain, cheapest
from broadcast.manifest import (
    KIND,
    MAX_BYTES,
    MAX_CHUNK_BYTES,
    MAX_OBJECTS,
    MAX_VALUES,
    Chunk,
    ObjectInfo,
    WeightsManifest,
    open_manifest,
    sign_manifest,
)
from broadcast.relay_store import versions_to_keep
from runspec.core.errors import UserError
from runspec.core.schema.samplers import Broadcast
from runspec.core.signed import BadSignature, SigningKey, sign_document

KEY = SigningKey.generate()
DIGEST = "ab" * 32
UNSAFE = ["../x", "/etc/passwd", "a/b", "", ".hidden", "manifest.json", "x" * 201, "a\x00b", "é"]


def payload() -> dict[str, Any]:
    chunks = [{"blake3": DIGEST, "size": 20}, {"blake3": "cd" * 32, "size": 10}]
    return {
        "run": "demo",
        "version": 3,
        "base": None,
        "model_digest": DIGEST,
        "tensors": {"w": {"dtype": "bfloat16", "shape": [2, 3], "blake3": DIGEST}},
        "files": ["w.safetensors"],
        "delta": {},
        "objects": {"w.safetensors": {"size": 30, "blake3": DIGEST, "chunks": chunks}},
    }


def opened(value: dict[str, Any]) -> WeightsManifest:
    return open_manifest(sign_document(KIND, value, KEY), run="demo", publishers={KEY.public_hex})


def test_what_is_signed_is_what_is_opened() -> None:
    chunk = Chunk(DIGEST, MAX_CHUNK_BYTES)
    made = ObjectInfo(2 * chunk.size, DIGEST, (chunk, chunk))
    tensor = {"t" * 512: {"dtype": "d" * 32, "shape": [2**44] * 16, "blake3": DIGEST}}
    objects, delta = {"x" * 200: made}, {"w.delta": made}
    manifest = WeightsManifest("demo", 2**31 - 1, 0, None, tensor, ("w",), objects, delta)
    data = sign_manifest(manifest, KEY)
    assert open_manifest(data, run="demo", publishers={KEY.public_hex}) == manifest
    assert manifest.chunks() == {DIGEST: chunk}
    assert (manifest.is_anchor, manifest.rebuilt_from) == (False, 0)
    assert opened(payload()).is_anchor
    for keys, run in (({"00" * 32}, "demo"), (None, "other")):
        with pytest.raises(BadSignature, match=r"may not sign it|of run 'demo', not 'other'"):
            open_manifest(data, run=run, publishers=keys)


W = ["objects", "w.safetensors"]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["version"], -1, "version"),
        (["version"], True, "version"),
        (["version"], 2**31, "version"),
        (["base"], 3, "base must be an older"),
        (["base"], -1, "base must be an older"),
        (["run"], "other", "of run 'other'"),
        (["model_digest"], "x", "model_digest"),
        (["objects"], {}, "neither whole nor a delta"),
        (["objects"], [], f"objects must be at most {MAX_OBJECTS} named files"),
        (["base"], 2, "a base needs a delta"),
        (["delta"], {"x": {"size": 0, "blake3": DIGEST, "chunks": []}}, "and a delta a base"),
        (["files"], ["w.safetensors", "other.safetensors"], "neither whole"),
        (["files"], ["../x"], "safe names"),
        (["files"], ["w.safetensors"] * 2, "none twice"),
        (["files"], {}, f"files must be at most {MAX_OBJECTS} names"),
        (["files"], [f"{n}" for n in range(MAX_OBJECTS + 1)], f"at most {MAX_OBJECTS} names"),
        (["extra"], 1, "fields"),
        (["extra"], "a\\b", "plain ASCII"),
        (["extra"], "\N{SNOWMAN}", "plain ASCII"),
        (["extra"], 10**17, "a number is too long"),
        (["extra"], [-(10**17)], "a number is too long"),
        (["tensors"], [], "named records"),
        (["tensors", "w"], {}, "must have dtype, shape, blake3"),
        (["tensors", "w", "dtype"], "x" * 33, "dtype"),
        (["tensors", "w", "shape"], [1] * 17, "shape"),
        (["tensors", "w", "shape"], [2**44 + 1], "shape"),
        (["tensors", "w", "shape"], [-1], "shape"),
        (["tensors", "w", "blake3"], DIGEST.upper(), "blake3"),
        (["tensors", "x" * 513], {}, "1 to 512"),
        (W, {"size": 1}, "must have size, blake3, chunks"),
        ([*W, "size"], 31, "add up"),
        ([*W, "size"], True, "size or blake3"),
        ([*W, "blake3"], "x", "size or blake3"),
        ([*W, "chunks"], {}, "chunks must be a list"),
        ([*W, "chunks", 0], [], "a chunk must have"),
        ([*W, "chunks", 1, "blake3"], DIGEST, "has two sizes"),
        ([*W, "chunks", 0, "size"], 0, "malformed"),
        ([*W, "chunks", 0, "size"], MAX_CHUNK_BYTES + 1, "malformed"),
        ([*W, "chunks", 0, "blake3"], "../../etc/passwd", "malformed"),
        *((["objects", name], payload()["objects"][W[1]], "safe file|plain A") for name in UNSAFE),
    ],
)
def test_one_wrong_field_is_enough(path: list[Any], value: object, said: str) -> None:
    changed = payload()
    node: Any = changed
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(BadSignature, match=said):
        opened(changed)


def test_files_that_hold_the_tensors_are_all_there_or_none() -> None:
    changed = payload() | {"base": 2, "files": ["w.safetensors", "more.safetensors"]}
    changed["delta"] = {"x": changed["objects"]["w.safetensors"]}
    with pytest.raises(BadSignature, match="only some of the files"):
        opened(changed)
    changed["objects"] = {"config.json": changed["objects"]["w.safetensors"]}
    assert not opened(changed).is_anchor


def test_more_values_than_any_honest_manifest_has_are_refused_unparsed() -> None:
    for unit in (b"[],", b"{},", b"0,"):
        data = unit * (MAX_BYTES // len(unit))
        with pytest.raises(BadSignature, match=f"{len(data)} bytes with .* values are too much"):
            open_manifest(data, run="demo", publishers=None)
    with pytest.raises(BadSignature, match="are too much"):
        open_manifest(b"x" * (MAX_BYTES + 1), run="demo", publishers=None)
    for data in (b"x" * MAX_BYTES, b"," * MAX_VALUES):
        with pytest.raises(BadSignature, match="not a signed document"):
            open_manifest(data, run="demo", publishers=None)


@pytest.mark.nightly
def test_two_terabytes_of_weights_have_a_manifest() -> None:
    chunks = tuple(Chunk(f"{i:064x}", 16 * 2**20) for i in range(2 * 10**12 // (16 * 2**20)))
    record = {"dtype": "bfloat16", "shape": [5120, 5120], "blake3": DIGEST}
    tensors = {f"model.layers.{i}.mlp.experts.down_proj.weight": record for i in range(20_000)}
    files = tuple(f"model-{i:05d}-of-00500.safetensors" for i in range(500))
    parts = [chunks[i * len(chunks) // 500 : (i + 1) * len(chunks) // 500] for i in range(500)]
    objects = {
        name: ObjectInfo(sum(c.size for c in part), DIGEST, part)
        for name, part in zip(files, parts, strict=True)
    }
    manifest = WeightsManifest("demo", 1, None, DIGEST, tensors, files, objects, {})
    data = sign_manifest(manifest, KEY)
    assert len(data) < MAX_BYTES
    assert open_manifest(data, run="demo", publishers={KEY.public_hex}) == manifest


Needs = dict[int, int | None]
Links = dict[int, WeightsManifest | None]
STEADY = settings(derandomize=True, deadline=None, max_examples=150)


@st.composite
def needs(draw: st.DrawFn) -> Needs:
    """1 to 40 versions as publishers make them and what each is rebuilt from: the first is an
    anchor, every other an anchor or a delta from some version before it."""
    found: Needs = {}
    for version in sorted(draw(st.sets(st.integers(0, 100), min_size=1, max_size=40))):
        before = sorted(found)[-3:]
        found[version] = draw(st.none() | st.sampled_from(before)) if before else None
    return found


def with_chains(versions: Collection[int], needs: Needs) -> set[int]:
    """Versions, and all that they are rebuilt from."""
    found = set(versions)
    for version in versions:
        if (base := needs[version]) is not None:
            found |= with_chains({base}, needs)
    return found


@STEADY
@given(needs(), st.integers(1, 6), st.lists(st.integers(0, 100), unique=True), st.data())
def test_what_is_kept_is_what_readers_and_joiners_need(needs, keep, pinned, data):
    # given versions of which some are not announced yet
    newest = data.draw(st.sampled_from(sorted(needs)))
    announced = sorted(version for version in needs if version <= newest)
    anchors = [version for version in announced if needs[version] is None]
    # then the newest stay, all since the last anchor, those to come, and what these need
    reasons = {*announced[-keep:], *(v for v in needs if v >= max(anchors))}
    without = versions_to_keep(needs, newest, keep)
    assert without == with_chains(reasons, needs)
    # and of those that are read as many chains more, the last read first
    read = [version for version in pinned if version in needs and version not in without][:keep]
    assert versions_to_keep(needs, newest, keep, pinned) == without | with_chains(read, needs)


def test_a_chain_that_is_not_held_whole_is_kept_as_far_as_it_is() -> None:
    # as a relay that has just joined: the newest version first, what it is from later or never
    assert versions_to_keep({7: 6, 6: 5, 3: None}, 7, 1) == {3, 6, 7}


def version_of(base: int | None, delta: int, whole: int | None) -> WeightsManifest:
    """A manifest of a version with a delta of so many bytes, and so many whole."""
    sizes = [("w", whole)], [("w.delta", None if base is None else delta)]
    objects, parts = (
        {name: ObjectInfo(size, "", ()) for name, size in each if size is not None}
        for each in sizes
    )
    return WeightsManifest("demo", 0, base, None, {}, ("w",), objects, parts)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Links, set[int]]:
    """Versions 0 to n-1: each an anchor, a delta, both, or pruned; and those that are held."""
    links: Links = {}
    whole = draw(st.integers(0, 60))
    for version in range(draw(st.integers(1, 12))):
        base = draw(st.none() | st.integers(0, version - 1)) if version else None
        size = 0 if base is None else draw(st.integers(0, 30))
        link = version_of(base, size, whole if base is None or draw(st.booleans()) else None)
        links[version] = draw(st.sampled_from([link, link, link, None]))
    return links, draw(st.sets(st.sampled_from(sorted(links))))


def every_way(target: int, links: Links, held: Collection[int]) -> Iterator[Chain]:
    """By recursion, from the oldest version on: unlike the planner, which walks back once."""
    if target in held:
        yield Chain(target, True, (), 0)
    if (link := links[target]) is None:
        return
    if link.is_anchor:
        yield Chain(target, False, (), link.weights_bytes)
    if link.base is not None:
        for way in every_way(link.base, links, held):
            yield Chain(way.start, way.held, (*way.deltas, target), way.size + link.delta_bytes)


@STEADY
@given(histories())
def test_the_way_is_the_one_with_the_fewest_bytes_and_questions(history):
    links, held = history
    target, known, asked = max(links), Links(), list[int]()

    def plan() -> Chain:
        while isinstance(step := cheapest(target, known, held), int):
            asked.append(step)
            known[step] = links[step]
        return step

    ways = list(every_way(target, links, held))
    if not ways:
        with pytest.raises(UserError, match=f"version {target} cannot be made: it needs version"):
            plan()
        return
    way = plan()
    assert way in ways  # every link is there, and the last one is the target
    assert (way.size, len(way.deltas)) == min((w.size, len(w.deltas)) for w in ways)
    # A manifest is worth a question while it may be that of the newest anchor, or on the way to
    # something held that costs less than that anchor.
    behind, anchor = 0, None
    for version in asked:
        assert anchor is None or (behind < anchor and version > min(held))
        if (link := links[version]) is not None:
            if anchor is None and link.is_anchor:
                anchor = behind + link.weights_bytes
            behind += link.delta_bytes
    assert not held & set(asked) and len(asked) == len(set(asked))


def test_an_endless_chain_is_given_up_and_no_run_makes_one() -> None:
    links: Links = {
        version: version_of(version - 1, 1, None) for version in range(1, 2 * MAX_LINKS)
    }
    links[2 * MAX_LINKS - 1 - MAX_LINKS] = version_of(None, 0, 9)
    assert isinstance(way := cheapest(2 * MAX_LINKS - 1, links, held=()), Chain)
    assert (way.start, len(way.deltas)) == (MAX_LINKS - 1, MAX_LINKS)
    links[MAX_LINKS - 1] = version_of(MAX_LINKS - 2, 1, None)
    with pytest.raises(UserError, match=f"no anchor within {MAX_LINKS} deltas"):
        cheapest(2 * MAX_LINKS - 1, links, held=())
    # Anchors are the multiples of `anchor_every`; where it is changed in a run, the way to the next
    # may be as long as both together.
    assert Broadcast(anchor_every=MAX_LINKS // 2).anchor_every == MAX_LINKS // 2
    with pytest.raises(ValueError, match="less than or equal"):
        Broadcast(anchor_every=MAX_LINKS // 2 + 1)
