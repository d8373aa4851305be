"""Calibration: fit of cost-model constants to published training runs or to measurements of this machine.

A card has the constants of a device or of a training framework (stack); see `cost`.
"""

from hyper_parallel.calibration._constants import Constant, check_card_file, write_card, write_local_cards
from hyper_parallel.calibration._local import (
    LocalRates,
    MeasuredStep,
    fastest_rates,
    fit_device,
    fit_probes,
    fit_stack,
    mean_rates,
)
from hyper_parallel.calibration._prediction import Cards, predict, predict_file, read_cards
from hyper_parallel.calibration._published_run import PublishedRun, read_run
from hyper_parallel.calibration.card_fit import FOLDS, Fit, fit_runs, read_runs, write_cards
from hyper_parallel.calibration.csv_rows import RowError

__all__ = [
    "FOLDS",
    "Cards",
    "Constant",
    "Fit",
    "LocalRates",
    "MeasuredStep",
    "PublishedRun",
    "RowError",
    "check_card_file",
    "fastest_rates",
    "fit_device",
    "fit_probes",
    "fit_runs",
    "fit_stack",
    "mean_rates",
    "predict",
    "predict_file",
    "read_cards",
    "read_run",
    "read_runs",
    "write_card",
    "write_cards",
    "write_local_cards",
]
