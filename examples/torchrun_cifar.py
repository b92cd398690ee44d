"""ResNet20 on CIFAR-10 across processes: what a DDP script becomes with α-NormEC.

    torchrun --nproc-per-node 2 examples/torchrun_cifar.py            (fetch the data first: normec data get cifar10)

Three lines differ from SGD under DDP: the model is not wrapped, the optimizer is ours, each rank saves its state.
"""

import argparse

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset

import normec.data
import normec.models
from normec.distributed import NormEC

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="cifar10")
parser.add_argument("--model", default="resnet20-gn")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--save", help="where each rank keeps its state")
options = parser.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")

data = normec.data.load(options.data)
own = Subset(data.train, range(rank, len(data.train), ranks))  # this rank's client
loader = DataLoader(own, batch_size=32, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(rank))
built = normec.models.build(options.model, data.shape, data.classes)
model, loss_of = built.model.to(device), built.loss  # no DistributedDataParallel: the gradient stays here

optimizer = NormEC(model.parameters(), lr=0.1, alpha=0.01, beta=0.1, server_norm=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)


def prepared(inputs):
    return data.transform(inputs.to(device)) if data.transform is not None else inputs.to(device)


for epoch in range(options.epochs):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = loss_of(model.train()(prepared(inputs)), targets.to(device))
        loss.backward()
        optimizer.step()
    schedule.step()
    if rank == 0:
        with torch.no_grad():
            hits = [model.eval()(prepared(x)).argmax(1).cpu() == y for x, y in DataLoader(data.test, 500)]
        print(f"epoch {epoch + 1}: loss {loss:.3f}, test accuracy {torch.cat(hits).float().mean():.1%}", flush=True)
    if options.save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{options.save}-{rank}.pt")
dist.destroy_process_group()
