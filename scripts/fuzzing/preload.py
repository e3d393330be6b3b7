"""All packages that an input may need: loaded once, before workers are forked."""

# ruff: noqa: F401
import threading

import ase.constraints
import ase.db
import ase.db.jsondb
import ase.db.sqlite
import ase.geometry
import ase.io
import e3nn
import lightning.pytorch
import lmdb
import matplotlib.figure
import matplotlib.pyplot
import PIL.Image
import requests
import scipy.ndimage
import torch_geometric.datasets
import tqdm
import vesin

import fuzzing.worker
import molflt.commands.evaluate
import molflt.commands.generate
import molflt.commands.inspect
import molflt.commands.merge
import molflt.commands.predict
import molflt.commands.train
import molflt.data.structures.convert
import molflt.data.structures.download
import molflt.data.text.split
import molflt.evaluation.energies
import molflt.evaluation.images
import molflt.evaluation.language
import molflt.evaluation.optimizers
import molflt.evaluation.pixels
import molflt.evaluation.population
import molflt.evaluation.translation
import molflt.graph
import molflt.image
import molflt.optimizers
import molflt.sequence
import molflt.training.fit
import molflt.training.loop

# In place of one between processes, which a killed worker would leave behind
tqdm.tqdm.set_lock(threading.RLock())
