"""Command lines with a mistake get one line that names what was typed and what to do."""

import shlex

import pytest

from coupled_adam.cli import main

LINES = {
    "": "name a command first: there are compare, train,",
    "comapre": "there is no command 'comapre': did you mean compare?",
    "compare --recipe tinny": "recipe 'tinny': did you mean tiny?",
    "compare --recipe missing.yaml": "'missing.yaml': No such file or directory. This package's",
    "compare --recipe .": "(as a file: Is a directory)",
    "compare training.lr=1e-3": "training.lr=1e-3; did you mean --training.lr 1e-3?",
    "compare --lr 1e-3": "unrecognized arguments: --lr 1e-3; did you mean --training.lr?",
    "compare --traning.lr 1e-3": "did you mean --training.lr?",
    "compare --stesp 3": "unrecognized arguments: --stesp 3; did you mean --steps?",
    # What other programs have, or other commands of this one
    "compare tiny --seeds 3": "unrecognized arguments: tiny; did you mean --recipe tiny?",
    "compare --config my.yaml": "--config my.yaml; did you mean --recipe my.yaml?",
    "compare --config=my.yaml": "--config=my.yaml; did you mean --recipe my.yaml?",
    "compare recipe=my.yaml": "recipe=my.yaml; did you mean --recipe my.yaml?",
    "compare --epochs 3": "--epochs 3; did you mean --training.tokens?",
    "compare --optimizer lean": "did you mean --arms.NAME '{optimizer: lean}'?",
    "compare --optimizer=lean": "did you mean --arms.NAME '{optimizer: lean}'?",
    "compare --arms.mine.optimizer=lion": "arms.mine.optimizer: there is no mine; there are adamw,",
    "compare --arms.mine '{optimizer: lion}'": "as {optimizer: table_rule, rule: lion}",
    "analyze gpt2 --csv x": "--csv x; see coupled-adam analyze --help",  # is not --counts
    "analyze gpt2 --cache x": "--cache x; see coupled-adam analyze --help",
    "analyze gpt2 --neighbors x": "did you mean --neighbours?",
    "report runs --html p": "--html p; did you mean coupled-adam analyze ... --html?",
    "sample m --max_new_tokens 9": "did you mean --tokens?",
    "sample m --topk 9": "unrecognized arguments: --topk 9; see coupled-adam sample --help",
    "analyze --neighbours a m": "MODEL. It comes first: coupled-adam analyze MODEL ...",
    "compare --seed 3": "did you mean --seeds?",
    "compare --seeds 0": "--seeds 0: there must be at least one seed",
    "compare --seeds": "argument --seeds: expected at least one argument",
    "compare --seeds 1 1": "--seeds 1 1: a seed is given twice",
    "compare --seeds -1": "--seeds -1: Input should be greater than or equal to 0",
    "compare --seeds 1,3": "separate several by spaces: --seeds 1 3",
    "compare --seeds three": "--seeds three: Input should be a valid integer",
    "compare --steps 0": "--steps 0: Input should be greater than or equal to 1",
    "compare --steps 1e3x": "--steps 1e3x: Input should be a valid integer",
    "compare --steps": "argument --steps: expected one argument",
    "compare --text nowhere/": "--text nowhere: there is no such file or folder",
    "compare --arms leen": "recipe 'demo' has no arm 'leen': did you mean lean?",
    "compare --arms.mine adamw": "arms.mine='adamw' must be an optimizer and its options",
    "compare --arms.mine '{lr: 1}'": "arms.mine.optimizer=None must be one of adamw, coupled_adam",
    "compare --arms.mine '{optimizer: adam}'": "arms.mine.optimizer='adam' must be one of adamw,",
    "compare --arms.nope.lr_factor 2": "arms.nope.lr_factor: there is no nope; there are adamw,",
    "compare --arms.lean.lr_facto 2": "arms.lean: lr_facto is no key: did you mean lr_factor?",
    "compare --arms.lean.lr_factor 0": "lr_factor=0: Input should be greater than 0",
    # What other tools call so, and nothing rather than a name that is only alike
    "compare --model gpt2": "did you mean --model.architecture?",
    "compare --model.name gpt2": "model.name is no key: there are architecture, vocab_size,",
    "compare --dataset openwebtext": "did you mean --data.hub?",
    "compare --layers 4": "did you mean --model.n_layer?",
    "compare --model.layers 4": "model.layers is no key: did you mean n_layer?",
    "compare --learning-rate 1": "did you mean --training.lr?",
    "compare --batch-size 8": "did you mean --training.batch_size?",
    "compare --lr_factor 4": "did you mean --arms.*.lr_factor?",
    "compare --arms.lean.embeddings lean": "embeddings is no key: there are lr_factor, lr, beta1,",
    "compare --arms.lean.steps 100": "steps is no key: there are lr_factor, lr, beta1, beta2",
    "compare --text a.txt b.txt": "unrecognized arguments: b.txt; see coupled-adam compare --help",
    "compare --resume runs/x": "unrecognized arguments: runs/x; did you mean --out runs/x?",
    "evaluate m --batch-size 4": "--batch-size 4; see coupled-adam evaluate --help",
    "evaluate m --tasks arc_easy": "did you mean --lm-eval?",
    # Arms are chosen, then multiplied
    "train --arm lean --arms.lean.lr [1,2]": "--arm lean has several values: name lean-1, or one",
    "compare --arms lean --arms.tuned.lr 1": "arms.tuned.lr: there is no tuned; there are lean",
    "compare --arms.lean.lr_factor []": "arms.lean.lr_factor=[] must have at least one value",
    "compare --arms.x*.lr 1": "arms.x*.lr: there is no x*; there are adamw, tuned, coupled",
    "compare --arms.mine '{optimizer: table_rule, rule: embr}'": "rule=embr: did you mean ember?",
    "compare --training.learning_rate 1": "training.learning_rate is no key: did you mean lr?",
    "compare --training.betas .9": "training.betas=0.9: must be several values in brackets",
    "compare --training.lr [": "--training.lr is not YAML",
    "compare --training.lr fast": "training.lr=fast: Input should be a valid number",
    "compare --training.steps null": "set exactly one of training.steps and training.tokens",
    "compare --training.schedule linear": "training.schedule=linear: Input should be 'cosine'",
    "compare --model.n_layer two": "model.n_layer=two: Input should be a valid int",
    "compare --model.n_layr 3": "model.n_layr is no key: did you mean n_layer?",
    "compare --model.n_head 7": "model.n_embd=64 must be a multiple of model.n_head=7",
    "compare --data.max_tokens 10": "data.max_tokens=10 must be more than training.sequence_length",
    "compare --variant foo": "variant=foo must be MODULE:NAME",
    "compare --logger paper": "--logger: invalid choice: 'paper'",
    "compare --strategy fsdp": "argument --strategy: invalid choice: 'fsdp'",
    "train --seed 1": "the following arguments are required: --arm",
    "train --arm leen": "recipe 'demo' has no arm 'leen': did you mean lean?",
    "recipes tinny": "recipe 'tinny': did you mean tiny?",
}


@pytest.mark.parametrize("line", LINES)
def test_wrong_lines(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)) == 2
    said = capsys.readouterr().err
    assert LINES[line] in said
    assert said.count("\n") == 1
    assert not [*tmp_path.iterdir()]
