"""Workloads in the style of public training code, and awkward ones: each function is a `build`, as a user writes it."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as people write it
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class CausalModel(nn.Module):
    """Returns its logits, and its loss where it is given targets."""

    def __init__(self, vocabulary=17, width=16, context=8):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets=None):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def nanogpt(batch_size, seed, rank, num_ranks, lr=1e-3):
    """Random crops of a text without end; decay of matrices only, clipping, warm-up and cosine, accumulation."""
    text = torch.randint(17, (500,), generator=torch.Generator().manual_seed(seed))

    def crops():
        while True:
            starts = torch.randint(500 - 9, (batch_size // 2,))
            yield tuple(torch.stack([text[s + n : s + n + 8] for s in starts]) for n in (0, 1))

    def make_optimizer(parameters):
        every = list(parameters)
        groups = [{"params": [p for p in every if p.dim() > 1], "weight_decay": 0.1}]
        return torch.optim.AdamW([*groups, {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0}], lr=lr)

    def factor(step):
        return (step + 1) / 4 if step < 4 else 0.1 + 0.45 * (1 + math.cos(math.pi * min(1, (step - 4) / 40)))

    return {
        "model": CausalModel(),
        "batches": crops(),
        "optimizer": make_optimizer,
        "schedule": lambda made: torch.optim.lr_scheduler.LambdaLR(made, factor),
        "clip_norm": 1.0,
        "accumulation": 2,
        "tokens_per_sample": 8,
    }


class CharDataset(Dataset):
    def __init__(self, text, context=8):
        letters = sorted(set(text))
        self.numbers = [letters.index(letter) for letter in text]
        self.context = context

    def __len__(self):
        return len(self.numbers) - self.context

    def __getitem__(self, index):
        chunk = torch.tensor(self.numbers[index : index + self.context + 1])
        return chunk[:-1], chunk[1:]


def mingpt(batch_size):
    """A dataset of letters as it is; the model returns its loss."""
    return CausalModel(vocabulary=30), CharDataset("the quick brown fox jumps over the lazy dog " * 9)


def word_language_model(batch_size, rank, num_ranks, seed, length=5):
    """Tokens with the sequence first; the hidden state is carried from batch to batch."""
    corpus = torch.randint(11, (40, batch_size * num_ranks), generator=torch.Generator().manual_seed(seed))
    mine = corpus[:, rank * batch_size : (rank + 1) * batch_size]

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.lstm, self.decoder = nn.Embedding(11, 12), nn.LSTM(12, 12, 2), nn.Linear(12, 11)

        def forward(self, tokens, state):
            output, state = self.lstm(self.encoder(tokens), state)
            return F.log_softmax(self.decoder(output).flatten(0, 1), dim=1), state

    carried = {"state": None}

    def loss(model, batch):
        tokens, targets = batch
        output, state = model(tokens, carried["state"])
        carried["state"] = tuple(part.detach() for part in state)
        return F.nll_loss(output, targets.flatten())

    return {
        "model": Recurrent(),
        "batches": [(mine[n : n + length], mine[n + 1 : n + 1 + length]) for n in range(0, 35, length)],
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        "clip_norm": 0.25,
        "batch_dim": 1,
        "tokens_per_sample": length,
    }


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.dropout = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Dropout(0.25)
        self.fc1, self.fc2 = nn.Linear(16, 8), nn.Linear(8, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc2(self.dropout(F.relu(self.fc1(x.flatten(1))))), dim=1)


def mnist(batch_size, gamma=0.7):
    """A loader of the whole data, a functional loss, a schedule, a test set with a metric of its own."""
    images, labels = torch.randn(97, 1, 8, 8), torch.randint(10, (97,))
    loader = DataLoader(TensorDataset(images, labels), batch_size, shuffle=True, drop_last=True)

    def evaluate(model, batch):
        output = model(batch[0])
        right = (output.argmax(1) == batch[1]).float().mean()
        return {"loss": F.nll_loss(output, batch[1]), "accuracy": right, "confidence": output.exp().max(1)[0].mean()}

    return {
        "model": Digits(),
        "batches": loader,
        "loss": F.nll_loss,
        "optimizer": lambda parameters: torch.optim.Adadelta(parameters, lr=1.0),
        "schedule": lambda made: torch.optim.lr_scheduler.StepLR(made, 1, gamma),
        "test_batches": TensorDataset(images[:20], labels[:20]),
        "evaluate": evaluate,
    }


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())

    def forward(self, x):
        return x + self.body(x)


def timm_style(batch_size, num_classes=7):
    """Stem, stages, pooled features and a head, as image libraries build them."""
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
    model = nn.Sequential(
        stem, Residual(8), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)
    )
    return model, [(torch.randn(batch_size, 3, 12, 12), torch.randint(num_classes, (batch_size,)))], F.cross_entropy


@dataclass
class Graph:
    """A batch that is an object with a `to` of its own."""

    x: torch.Tensor
    edge_index: torch.Tensor
    y: torch.Tensor

    def to(self, device):
        return Graph(self.x.to(device), self.edge_index.to(device), self.y.to(device))


def graph_network(batch_size):
    """Messages along the edges of a graph."""

    class Convolution(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.linear = nn.Linear(inputs, outputs)

        def forward(self, x, edge_index):
            source, target = edge_index
            degree = torch.bincount(target, minlength=len(x)).clamp(min=1).unsqueeze(1)
            return self.linear(x + torch.zeros_like(x).index_add(0, target, x[source]) / degree)

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Convolution(5, 8), Convolution(8, 3)

        def forward(self, graph):
            return self.second(self.first(graph.x, graph.edge_index).relu(), graph.edge_index)

    graph = Graph(torch.randn(20, 5), torch.randint(20, (2, 60)), torch.randint(3, (20,)))
    return Network(), [graph], lambda model, batch: F.cross_entropy(model(batch), batch.y)


class Unet(nn.Module):
    """A small U-Net with time steps, that predicts noise."""

    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(1000, 8)
        self.down, self.middle = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.up, self.end = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(8, 3, 3, 1, 1)

    def forward(self, sample, timestep):
        down = self.down(sample) + self.time(timestep)[:, :, None, None]
        return self.end(self.up(torch.cat([down, self.middle(down).relu()], 1)).relu())


def diffusion(batch_size):
    def loss(model, images):
        noise, steps = torch.randn_like(images), torch.randint(1000, (len(images),))
        level = (steps / 1000)[:, None, None, None]
        return F.mse_loss(model((1 - level) * images + level * noise, steps), noise)

    return Unet(), [torch.randn(batch_size, 3, 8, 8)], loss


def dcgan(batch_size):
    """Two networks with batch norm that take turns."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(4, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1)
    )
    judge = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4), nn.Flatten()
    )

    def criterion(output, label):
        return F.binary_cross_entropy_with_logits(output, torch.full_like(output, label))

    def judge_loss(model, images):
        fakes = model.generator(torch.randn(len(images), 4, 1, 1)).detach()
        return criterion(model.judge(images), 1.0) + criterion(model.judge(fakes), 0.0)

    def generator_loss(model, images):
        return criterion(model.judge(model.generator(torch.randn(len(images), 4, 1, 1))), 1.0)

    model = nn.Module()
    model.generator, model.judge = generator, judge
    make = lambda parameters: torch.optim.Adam(parameters, lr=2e-4, betas=(0.5, 0.999))  # noqa: E731 - as people write it
    return {
        "model": model,
        "batches": [torch.randn(batch_size, 1, 8, 8) for _ in range(3)],
        "loss": {"judge": judge_loss, "generator": generator_loss},
        "optimizer": {"judge": make, "generator": make},
    }


def variable_length(batch_size):
    """Every batch is as long as its longest sentence."""

    def collate(sentences):
        return pad_sequence(list(sentences), batch_first=True), torch.tensor([len(one) % 2 for one in sentences])

    sentences = [torch.randint(1, 9, (length % 7 + 2,)) for length in range(6 * batch_size)]
    loader = DataLoader(sentences, batch_size, collate_fn=collate)
    model = nn.Sequential(nn.EmbeddingBag(9, 6, mode="mean", padding_idx=0), nn.Linear(6, 2))
    return model, loader, nn.CrossEntropyLoss()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.unused = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x))


def unused_parameters(batch_size):
    return TwoHeads(), [(torch.randn(batch_size, 4), torch.randn(batch_size, 2))], nn.MSELoss()


def two_towers(batch_size):
    """Users and items in a dict, compared with each other."""
    model = nn.ModuleDict({"users": nn.Embedding(50, 6), "things": nn.Sequential(nn.Linear(4, 6), nn.ReLU())})

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.towers = model

        def forward(self, user, item):
            return self.towers["users"](user) @ self.towers["things"](item).T

    def loss(model, batch):
        return F.cross_entropy(model(**batch), torch.arange(len(batch["user"])))

    batch = {"user": torch.randint(50, (batch_size,)), "item": torch.randn(batch_size, 4)}
    return {"model": Towers(), "batches": [batch], "loss": loss}


class Vae(nn.Module):
    """Returns three tensors."""

    def __init__(self):
        super().__init__()
        self.encoder, self.mean, self.spread, self.decoder = (
            nn.Linear(16, 8),
            nn.Linear(8, 2),
            nn.Linear(8, 2),
            nn.Linear(2, 16),
        )

    def forward(self, x):
        hidden = self.encoder(x).relu()
        mean, spread = self.mean(hidden), self.spread(hidden)
        return self.decoder(mean + torch.randn_like(mean) * (spread / 2).exp()).sigmoid(), mean, spread


def vae(batch_size):
    def loss(model, batch):
        images = batch[0].flatten(1)
        found, mean, spread = model(images)
        return F.binary_cross_entropy(found, images) - 0.5 * (1 + spread - mean**2 - spread.exp()).mean()

    return Vae(), DataLoader(TensorDataset(torch.rand(10 * batch_size, 4, 4)), batch_size), loss


class Detector(nn.Module):
    """Takes a list of images of different sizes and a list of targets, and returns its losses by name."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, images, targets):
        features = torch.stack([self.conv(image).mean((1, 2)) for image in images])
        boxes = torch.stack([target["boxes"] for target in targets])
        found = self.head(features)
        return {"boxes": F.mse_loss(found[:, :4], boxes), "score": found[:, 4].square().mean()}


def detection(batch_size):
    images = [torch.randn(3, 6 + n, 7) for n in range(batch_size)]
    batch = (images, [{"boxes": torch.rand(4)} for _ in images])
    return Detector(), [batch], lambda model, batch: sum(model(*batch).values())


class Contrastive(nn.Module):
    """Called twice in every step."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x):
        return F.normalize(self.body(x), dim=1)


def siamese(batch_size):
    def loss(model, batch):
        left, right = model(batch), model(batch + 0.1)
        return F.cross_entropy(left @ right.T / 0.1, torch.arange(len(batch)))

    return Contrastive(), [torch.randn(batch_size, 6)], loss


def frozen_backbone(batch_size):
    """Only the head is trained, with learning rates by group from the model itself."""
    backbone, head = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU()), nn.Linear(6, 2)
    backbone.requires_grad_(False)
    make = lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)  # noqa: E731
    batches = [(torch.randn(batch_size, 5), torch.randint(2, (batch_size,)))]
    return nn.Sequential(backbone, head), batches, nn.CrossEntropyLoss(), make
