"""fairseq's flags on this package's command line: some are aliases of our options; for others an error names ours."""

import re
from collections.abc import Container

SAME = {
    "train": {
        "--save-dir": "--output",
        "--max-update": "--updates",
        "--update-freq": "--accumulate",
        "--warmup-updates": "--warmup",
    },
    "translate": {"--nbest": "--n-best"},
}
"""For each command, the fairseq flags that are aliases here, because our option has the same meaning and values."""
OTHERS = {
    "--arch": "--preset NAME (transformer is transformer-base, transformer_iwslt_de_en is transformer-small)",
    "--max-epoch": "--epochs N --updates 0",
    "--batch-size": "--max-tokens N, which counts padded tokens",
    "--max-sentences": "--max-tokens N, which counts padded tokens",
    "--lr-scheduler": "--schedule NAME (inverse_sqrt is inverse-sqrt)",
    "--adam-betas": "--beta1 X --beta2 X",
    "--fp16": "--precision bf16",
    "--bf16": "--precision bf16",
    "--restore-file": "--resume goes on with the run in --output, from --from-checkpoint NAME",
    "--keep-last-epochs": "--keep N",
    "--keep-interval-updates": "--keep N",
    "--no-epoch-checkpoints": "--keep 1",
    "--validate-interval-updates": "--evaluate-every N",
    "--save-interval-updates": "--evaluate-every N",
    "--eval-bleu": "--criterion bleu",
    "--best-checkpoint-metric": "--criterion bleu or loss",
    "--maximize-best-checkpoint-metric": "leave it out, --criterion says what is best",
    "--share-all-embeddings": "--tie-embeddings all",
    "--share-decoder-input-output-embed": "--tie-embeddings decoder",
    "--encoder-embed-dim": "--d-model N",
    "--decoder-embed-dim": "--d-model N",
    "--encoder-ffn-embed-dim": "--d-ff N",
    "--decoder-ffn-embed-dim": "--d-ff N",
    "--encoder-attention-heads": "--heads N",
    "--decoder-attention-heads": "--heads N",
    "--encoder-normalize-before": "--residual prenorm",
    "--decoder-normalize-before": "--residual prenorm",
    "--encoder-learned-pos": "--positions learned",
    "--decoder-learned-pos": "--positions learned",
    "--max-source-positions": "--max-positions N",
    "--max-target-positions": "--max-positions N",
    "--skip-invalid-size-inputs-valid-test": "--skip-long",
    "--stop-min-lr": "--min-lr X",
    "--tokens-per-sample": "--segment-length N",
    "--relu-dropout": "--activation-dropout X",
    "--task": "leave it out, the model says what it is",
    "--path": "--model DIR, a run's folder; `normformer-rs convert` makes one of a .pt",
    "--lenpen": "--alpha X --rule fairseq",
    "--gen-subset": "--split NAME",
    "--max-len-b": "--max-length N",
    "--remove-bpe": "leave it out, pieces are joined as the run has cut them",
    "--sampling": "leave it out, --temperature 0 takes the most probable token",
    "--sampling-topk": "--top-k N",
    "--sampling-topp": "--top-p X",
    "--prefix-size": "--prompt TEXT",
    "--cpu": "--device cpu",
    "--user-dir": "leave it out, the names are built in",
    "--num-workers": "leave it out",
    "--log-interval": "leave it out",
    "--ddp-backend": "leave it out; torchrun starts several processes",
    "--distributed-world-size": "leave it out; torchrun starts several processes",
}
"""For each fairseq flag that is no alias, the text of the error: our option, or what to do instead."""
_CRITERION = "--criterion decides which checkpoint is best: bleu or loss; fairseq's is --label-smoothing X here"
VALUES = {("criterion", "label_smoothed_cross_entropy"): _CRITERION, ("criterion", "cross_entropy"): _CRITERION}
"""For options that both packages have, the errors for values that only fairseq has."""


def answer(flag: str, flags: Container[str]) -> str | None:
    """Returns the error for one of fairseq's flags, such as `--arch is fairseq's; here: --preset NAME`. Returns None
    if `flag` is not fairseq's, or if the error would name an option that is not in `flags`, the command's options."""
    ours = OTHERS.get(flag)
    if ours is None or not all(named in flags for named in re.findall(r"--[\w-]+", ours)):
        return None
    return f"{flag} is fairseq's; here: {ours}"
