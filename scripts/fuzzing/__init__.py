"""What `scripts/fuzz.py` is made of: seeds, mutations, formats, and workers that run the inputs.

seeds      valid files, made once from the shipped sample, and runs trained on them
mutate     damage that knows nothing of the format: bits, bytes, chunks, magic numbers
grammar    damage in JSON and YAML trees, words of texts, members of archives, LMDB pages
payloads   files that would run code if anything in them were executed
structures, runs, media   formats: how an input is made, and what its acceptance has to give
oracles    decoders that share no code with the package
worker     runs inputs through `molflt.commands.cli.main` and watches what they do
pool       watches the workers: time, death, restarts; says what came of an input
"""
