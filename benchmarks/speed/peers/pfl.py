"""pfl-research: FederatedAveraging with one local step, clipped updates, the simulated backend, no client memory."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..clock import Clock
from ..workloads import LR, WorkloadData


def run(data: WorkloadData, clock: Clock) -> str:
    os.environ["PFL_PYTORCH_DEVICE"] = data.case.device
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.dataset import Dataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.privacy_mechanism import NormClippingOnly

    case = data.case

    class Ticks(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(
            self,
            aggregate_metrics: Any,  # noqa: ARG002
            model: Any,  # noqa: ARG002
            *,
            central_iteration: int,  # noqa: ARG002
        ) -> tuple[bool, Any]:
            return clock.tick(), Metrics()

    def records_of(client: int) -> Any:
        return Dataset(raw_data=list(data.client_batch(client)))

    model = _Trained(data)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=clock.max_rounds,
            evaluation_frequency=clock.max_rounds,
            train_cohort_size=case.drawn,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(
            training_data=FederatedDataset(records_of, get_user_sampler("minimize_reuse", list(range(case.clients)))),
            val_data=None,
            postprocessors=[NormClippingOnly(order=2, clipping_bound=LR)],
        ),
        model=PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=case.spec.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Ticks()],
        send_metrics_to_platform=False,
    )
    return "no client memory"


class _Trained(torch.nn.Module):
    """The model with the methods `loss` and `metrics` that pfl needs."""

    def __init__(self, data: WorkloadData) -> None:
        super().__init__()
        self.inner, self._loss = data.built.model.to(data.case.device), data.built.loss

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._loss(self.inner(inputs), targets)

    def metrics(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:  # noqa: ARG002
        return {}
