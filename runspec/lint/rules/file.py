"""Pages of the findings of the loader: YAML, keys, types, layers, variables, comments."""

from __future__ import annotations

from runspec.lint import found_by_loader


@found_by_loader("mend the text there")
def yaml() -> None:
    """A file is one YAML document that holds a map.

    It is read by YAML 1.2's core schema. Tags, several documents, keys that are no words,
    characters that YAML forbids and an empty file are refused, and so is too much of anything: 256
    KiB of text, 32 levels, 20,000 nodes with aliases expanded, numbers of 64 characters.

        characters <= 262144, depth <= 32, nodes <= 20000

    Nothing else is said of a spec with a broken file, it cannot be suppressed, and no later layer
    hides it.
    Source: YAML 1.2.2, section 10.3.2.
    """


@found_by_loader("name .yaml files that are there, relative to this one")
def extends() -> None:
    """Every file of `extends` is there, and no file extends itself.

    `extends: [a.yaml, b.yaml]` names files relative to the one that says it. Each must be readable
    UTF-8, none may lead back to a file that is being read, and a spec is made of 32 files at most.
    What the missing file would have said is unknown, so nothing that needs it is looked at.
    """


@found_by_loader("keep one of the two")
def duplicate_key() -> None:
    """A map says each key once.

    Most YAML readers take the last of two equal keys in silence. Here the first counts, and the
    second is an error: one of the two is not what the run does.
    """


@found_by_loader("keep one of the two, or give this one another name")
def duplicate_name() -> None:
    """A list of named objects says each name once.

    Layers merge `data.sources`, `reward`, `samplers`, `broadcast.relays` and `secrets` by name, so
    within one layer a name stands for one object.
    """


@found_by_loader("take the line out")
def unknown_name() -> None:
    """What a layer changes or deletes in a named list is there.

    `samplers: {volunteers: null}` takes away a pool of a lower layer, `samplers: {volunteers:
    {replicas: 2}}` changes it. A name that no lower layer has makes a new object. Where that lacks
    required keys, it is an error that lists them and the name that was probably meant. Where it
    lacks nothing and its name is one letter off another's, it is a warning.
    """


@found_by_loader()
def unknown_key() -> None:
    """Every key is one of the schema's.

    A misspelt key would leave the default in force without a word. It is looked for in every layer,
    so that no later layer and no null hides it. The nearest known key of the same map is suggested,
    and `--fix` writes it where that map does not have it already; a key that belongs elsewhere is
    named with its home.
    """


@found_by_loader("`runspec explain {path}` says what belongs there")
def missing_key() -> None:
    """Every required key has a value.

    Required are the keys without a default; `runspec explain` says which. A null deletes what a
    lower layer said, and then the default counts, if there is one.
    """


@found_by_loader()
def wrong_kind() -> None:
    """Every value belongs to the run's `algorithm.kind`.

    Runs of kind `pretrain` and `sft` train on documents: they have no rewards, samplers or
    verification, and their own fields of `algorithm` mean nothing to a run of kind `grpo`. A value
    that nothing reads would be believed to have an effect.
    """


@found_by_loader("`runspec explain {path}` says what belongs there")
def wrong_type() -> None:
    """Every value has the type of its key.

    A number in quotes is text, and a number where text belongs is a number: nothing is converted in
    silence. Where the same characters with or without quotes have the right type, `--fix` writes
    them.
    """


@found_by_loader("`runspec explain {path}` says what is allowed")
def bad_value() -> None:
    """Every value lies in the range of its key.

    Bounds and choices are the schema's; `runspec explain` shows them. The finding says what was
    measured and the bound, for example

        seed >= 0

    and of a choice the nearest that there is.
    """


@found_by_loader("write the unit behind the number")
def unit() -> None:
    """Times, sizes and rates carry their unit.

    `90m`, `80GB`, `590Mbit/s`: a bare number would leave its unit to a guess, and a wrong guess is
    a factor of 60 or 1000. Decimal and binary units are what they say: GB is 10^9 bytes, GiB is
    2^30. Bits are written with a small b, bytes with a capital one.
    """


@found_by_loader(severity="warning")
def ambiguous_scalar() -> None:
    """A plain scalar reads the same in YAML 1.1 and YAML 1.2.

    Specs are YAML 1.2; most other tools, and many people, read YAML 1.1. There `on`, `off`, `yes`,
    `no`, `y` and `n` are booleans, `010` is eight, `12:30` is 750, `1_000` is a thousand and
    `2026-01-31` is a date, and here the first is text, the second ten and the others text. Where
    the value does not fit its key it is an error, elsewhere a warning. `--fix` writes what reads
    the same everywhere: `true`, `1000`, or quotes. A number in a numeric field is never a finding.
    Source: https://yaml.org/type/bool.html, int.html and timestamp.html beside it; YAML 1.2.2,
    10.3.2.
    """


@found_by_loader("set the variable, or write $ in another way")
def variable() -> None:
    """Every `${VAR}` that is used is set.

    Variables are filled in from the environment once the layers are merged, so one that a later
    layer hides is not read. `${VAR:?what it is for}` refuses an empty one too and says why it is
    needed. A `${` that is no variable is an error.
    """


@found_by_loader("name the variable under secrets alone")
def secret_value() -> None:
    """No value of the spec is a secret's.

    `secrets` names environment variables that only the process that needs one sees. A `${VAR}` of
    the same variable would write its value into the resolved spec, and from there into plans,
    states and logs. It cannot be suppressed.
    """


@found_by_loader("say it in the recipe")
def placement_scope() -> None:
    """A placement says what is a site's to say, of what its recipe has.

    A file of kind Placement may set hardware, mesh, relays, folders, secrets, budget and measured
    figures: the fields that `runspec explain` marks as a site's. What is learned, how workers are
    checked and which pools there are is the recipe's, so that the same recipe learns the same at
    every site.
    """


@found_by_loader('# runspec: ignore[CODE] reason="..."', severity="warning")
def malformed_suppression() -> None:
    """A comment that begins with `# runspec:` is a suppression.

    It reads

        # runspec: ignore[CODE, ...] reason="..."

    behind the value or key that it is about, or alone on the line above. Behind or above a key that
    holds a block it is about the whole block.
    """


@found_by_loader('write reason="..." behind it')
def suppression_reason() -> None:
    """A suppression says why.

    Whoever reads the spec next must be able to tell whether the reason still holds. Without one, or
    with an empty one, the suppression counts for nothing.
    """


@found_by_loader("`runspec explain --list` names the rules")
def unknown_rule() -> None:
    """A suppression names rules that there are.

    `runspec explain --list` lists them. A misspelt code suppresses nothing; the nearest is
    suggested, and `--fix` writes it.
    """


@found_by_loader("take it out", severity="warning")
def unused_suppression() -> None:
    """A suppression takes a finding away.

    One that does not is left over from a spec that has changed, and would hide the same finding
    when it comes back for another reason. It is looked for in the topmost file of a spec, and not
    with `--set`: in a layer under others a suppression may serve other specs. Of several specs that
    are linted at once none may need it. `--fix` removes it, or of several codes those that are of
    no use.
    """


@found_by_loader("seed: 42, or any number you like", group="reproducibility")
def no_seed() -> None:
    """A spec must have a seed.

    Problems, target lengths, the warm start and the learner's draws follow from `seed`. A default
    would make runs of different people secretly alike; a random one would make no run repeatable.
    The noise of untrusted pools does not follow from it alone: the coordinator mixes in a nonce of
    each step, which workers must not be able to foresee (docs/coordinator.md).
    """
