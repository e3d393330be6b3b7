"""What commands refuse."""

from refusals import Refusal, Refused, command

ROWS = [
    Refusal(command("predict"), "file", "predict --help", error=Refused),
    Refusal(command("train --model.dim=0"), "model.dim", "1", "0", error=Refused),
]
