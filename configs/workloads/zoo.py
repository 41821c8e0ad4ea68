"""Small models of many families, one function each, for checks over all of them.

Profile one with ``ckplan profile configs/workloads/zoo.py:mixtral``. Weights are
random, sizes are a step of about a second and some hundred MiB on two cores.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

Batch = dict[str, torch.Tensor]
Made = tuple[nn.Module, Batch]
MadeWithLoss = tuple[nn.Module, Any, Callable[[Any, Any], torch.Tensor]]

# -- language models -----------------------------------------------------------------


def tokens(vocab: int, batch: int, length: int) -> Batch:
    """Random tokens that are their own labels."""
    ids = torch.randint(vocab, (batch, length))
    return {"input_ids": ids, "labels": ids}


def mistral(*, layers: int = 6, batch: int = 4, length: int = 256) -> Made:
    """Grouped queries within a sliding window."""
    config = transformers.MistralConfig(
        num_hidden_layers=layers,
        hidden_size=256,
        intermediate_size=768,
        num_attention_heads=8,
        num_key_value_heads=2,
        sliding_window=128,
        vocab_size=8000,
        use_cache=False,
    )
    return transformers.MistralForCausalLM(config), tokens(8000, batch, length)


def mixtral(*, layers: int = 4, batch: int = 4, length: int = 128) -> Made:
    """A mixture of experts: tokens go where a router sends them."""
    config = transformers.MixtralConfig(
        num_hidden_layers=layers,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=4,
        vocab_size=4000,
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config), tokens(4000, batch, length)


def gemma(*, layers: int = 4, batch: int = 4, length: int = 256) -> Made:
    """Gated, with a tied embedding that is scaled."""
    config = transformers.GemmaConfig(
        num_hidden_layers=layers,
        hidden_size=256,
        intermediate_size=1024,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=8000,
        use_cache=False,
    )
    return transformers.GemmaForCausalLM(config), tokens(8000, batch, length)


def bloom(*, layers: int = 6, batch: int = 4, length: int = 256) -> Made:
    """Distances instead of positions (ALiBi), and an own function for GELU."""
    config = transformers.BloomConfig(
        n_layer=layers, hidden_size=256, n_head=8, vocab_size=4000, use_cache=False
    )
    return transformers.BloomForCausalLM(config), tokens(4000, batch, length)


def opt(*, layers: int = 6, batch: int = 4, length: int = 256) -> Made:
    """A decoder with dropout, learned positions and ReLU."""
    config = transformers.OPTConfig(
        num_hidden_layers=layers,
        hidden_size=256,
        ffn_dim=1024,
        num_attention_heads=8,
        word_embed_proj_dim=256,
        max_position_embeddings=length,
        vocab_size=4000,
        use_cache=False,
    )
    return transformers.OPTForCausalLM(config), tokens(4000, batch, length)


def t5(*, layers: int = 4, batch: int = 4, length: int = 128) -> Made:
    """An encoder and a decoder with relative positions."""
    config = transformers.T5Config(
        num_layers=layers,
        d_model=256,
        d_ff=1024,
        d_kv=32,
        num_heads=8,
        vocab_size=4000,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), tokens(4000, batch, length)


def bart(*, layers: int = 4, batch: int = 4, length: int = 128) -> Made:
    """An encoder and a decoder with learned positions."""
    config = transformers.BartConfig(
        encoder_layers=layers,
        decoder_layers=layers,
        d_model=256,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        max_position_embeddings=length,
        vocab_size=4000,
        use_cache=False,
    )
    return transformers.BartForConditionalGeneration(config), tokens(
        4000, batch, length
    )


def albert(*, layers: int = 8, batch: int = 4, length: int = 128) -> Made:
    """One layer, called many times."""
    config = transformers.AlbertConfig(
        num_hidden_layers=layers,
        hidden_size=384,
        intermediate_size=1536,
        num_attention_heads=6,
        vocab_size=8000,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return transformers.AlbertForMaskedLM(config), tokens(8000, batch, length)


def distilbert(*, layers: int = 6, batch: int = 8, length: int = 128) -> Made:
    """An encoder with dropout, answering where an answer begins and ends."""
    config = transformers.DistilBertConfig(
        n_layers=layers, dim=256, hidden_dim=1024, n_heads=8, vocab_size=8000
    )
    place = torch.randint(length, (batch,))
    return transformers.DistilBertForQuestionAnswering(config), {
        "input_ids": torch.randint(8000, (batch, length)),
        "start_positions": place,
        "end_positions": place,
    }


def deberta(*, layers: int = 4, batch: int = 4, length: int = 128) -> Made:
    """Attention to contents and to relative positions apart, by gathering."""
    config = transformers.DebertaV2Config(
        num_hidden_layers=layers,
        hidden_size=256,
        intermediate_size=1024,
        num_attention_heads=8,
        vocab_size=8000,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=32,
        max_position_embeddings=length,
    )
    return transformers.DebertaV2ForMaskedLM(config), tokens(8000, batch, length)


def electra(*, layers: int = 6, batch: int = 8, length: int = 128) -> Made:
    """Tells which tokens are not the original ones."""
    config = transformers.ElectraConfig(
        num_hidden_layers=layers,
        hidden_size=256,
        embedding_size=128,
        intermediate_size=1024,
        num_attention_heads=8,
        vocab_size=8000,
    )
    return transformers.ElectraForPreTraining(config), {
        "input_ids": torch.randint(8000, (batch, length)),
        "labels": torch.randint(2, (batch, length)),
    }


def mamba(*, layers: int = 4, batch: int = 2, length: int = 64) -> Made:
    """A selective scan, step by step in Python."""
    config = transformers.MambaConfig(
        num_hidden_layers=layers,
        hidden_size=128,
        state_size=16,
        vocab_size=4000,
        use_cache=False,
    )
    return transformers.MambaForCausalLM(config), tokens(4000, batch, length)


def lora(*, layers: int = 6, batch: int = 4, length: int = 256) -> Made:
    """A frozen GPT-2 with trained low-rank updates (peft)."""
    import peft

    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=256,
        n_head=8,
        n_positions=length,
        vocab_size=4000,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    update = peft.LoraConfig(
        r=8, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True
    )
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), update)
    return model, tokens(4000, batch, length)


# -- images --------------------------------------------------------------------------


def images(classes: int, batch: int, size: int) -> Batch:
    """Random images with random labels."""
    return {
        "pixel_values": torch.randn(batch, 3, size, size),
        "labels": torch.randint(classes, (batch,)),
    }


def swin(*, batch: int = 8, size: int = 224, stages: int = 4) -> Made:
    """Attention within windows that are shifted."""
    config = transformers.SwinConfig(
        image_size=size,
        embed_dim=48,
        depths=[2, 2, 4, 2][:stages],
        num_heads=[2, 4, 8, 16][:stages],
        window_size=7,
        num_labels=100,
    )
    return transformers.SwinForImageClassification(config), images(100, batch, size)


def convnext(*, batch: int = 8, size: int = 96, stages: int = 4) -> Made:
    """Wide depthwise convolutions, and norms over channels."""
    config = transformers.ConvNextConfig(
        num_stages=stages,
        hidden_sizes=[48, 96, 192, 384][:stages],
        depths=[2, 2, 4, 2][:stages],
        num_labels=100,
    )
    return transformers.ConvNextForImageClassification(config), images(100, batch, size)


def efficientnet(*, batch: int = 8, size: int = 96) -> Made:
    """Inverted bottlenecks that weigh their channels."""
    config = transformers.EfficientNetConfig(
        image_size=size,
        width_coefficient=0.5,
        depth_coefficient=0.5,
        hidden_dim=640,
        num_labels=100,
    )
    return transformers.EfficientNetForImageClassification(config), images(
        100, batch, size
    )


def mobilenet(*, batch: int = 8, size: int = 128) -> Made:
    """Inverted bottlenecks of depthwise convolutions."""
    config = transformers.MobileNetV2Config(image_size=size, num_labels=100)
    return transformers.MobileNetV2ForImageClassification(config), images(
        100, batch, size
    )


def regnet(*, batch: int = 8, size: int = 128) -> Made:
    """Bottlenecks of grouped convolutions."""
    config = transformers.RegNetConfig(
        hidden_sizes=[32, 64, 128, 256],
        depths=[1, 2, 3, 1],
        groups_width=16,
        num_labels=100,
    )
    return transformers.RegNetForImageClassification(config), images(100, batch, size)


def segformer(*, batch: int = 4, size: int = 128) -> Made:
    """A hierarchy of encoders whose scales a head brings together again."""
    config = transformers.SegformerConfig(
        hidden_sizes=[32, 64, 128, 192], decoder_hidden_size=128, num_labels=20
    )
    return transformers.SegformerForSemanticSegmentation(config), {
        "pixel_values": torch.randn(batch, 3, size, size),
        "labels": torch.randint(20, (batch, size, size)),
    }


def clip(*, layers: int = 4, batch: int = 8) -> Made:
    """Two towers, compared with each other."""
    config = transformers.CLIPConfig(
        text_config={
            "num_hidden_layers": layers,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_attention_heads": 8,
            "vocab_size": 4000,
            "eos_token_id": 3999,
        },
        vision_config={
            "num_hidden_layers": layers,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_attention_heads": 8,
            "image_size": 96,
            "patch_size": 8,
        },
        projection_dim=128,
    )
    model = transformers.CLIPModel(config)
    batch_ = {
        "input_ids": torch.randint(3999, (batch, 64)),
        "pixel_values": torch.randn(batch, 3, 96, 96),
        "return_loss": True,
    }
    return model, batch_


class Dense(nn.Module):
    """What came before, and 24 channels more."""

    def __init__(self, channels: int, growth: int) -> None:
        """Norm, ReLU and convolution, twice."""
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate input and output."""
        return torch.cat([x, self.layers(x)], 1)


def densenet(*, batch: int = 8, size: int = 96, growth: int = 24) -> MadeWithLoss:
    """Blocks in which each layer reads all earlier ones."""
    layers: list[nn.Module] = [nn.Conv2d(3, 2 * growth, 7, stride=2, padding=3)]
    channels = 2 * growth
    for depth in (4, 6, 6):
        for _ in range(depth):
            layers.append(Dense(channels, growth))
            channels += growth
        layers += [nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2)]
        channels //= 2
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100)]
    return nn.Sequential(*layers, *head), _classified(batch, size), class_loss


class Inception(nn.Module):
    """Four branches side by side."""

    def __init__(self, channels: int, width: int) -> None:
        """Branches of 1, 2 and 3 convolutions, and one that pools."""
        super().__init__()
        self.one = self._convolve(channels, width, 1)
        self.two = nn.Sequential(
            self._convolve(channels, width, 1), self._convolve(width, width, 5)
        )
        self.three = nn.Sequential(
            self._convolve(channels, width, 1),
            self._convolve(width, width, 3),
            self._convolve(width, width, 3),
        )
        self.pool = nn.Sequential(
            nn.AvgPool2d(3, stride=1, padding=1), self._convolve(channels, width, 1)
        )

    @staticmethod
    def _convolve(channels: int, width: int, size: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, width, size, padding=size // 2, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the branches."""
        return torch.cat([self.one(x), self.two(x), self.three(x), self.pool(x)], 1)


def inception(*, batch: int = 8, size: int = 96, width: int = 32) -> MadeWithLoss:
    """Branching blocks between poolings."""
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2),
        *(Inception(width if i == 0 else 4 * width, width) for i in range(3)),
        nn.MaxPool2d(3, stride=2),
        *(Inception(4 * width, width) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(4 * width, 100),
    )
    return model, _classified(batch, size), class_loss


def vgg(*, batch: int = 8, size: int = 64) -> MadeWithLoss:
    """Convolutions, poolings and a wide head, one after the other."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128, 256):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    side = size // 16
    head = [nn.Flatten(), nn.Linear(256 * side * side, 512), nn.ReLU(), nn.Dropout()]
    model = nn.Sequential(*layers, *head, nn.Linear(512, 100))
    return model, _classified(batch, size), class_loss


class Mixer(nn.Module):
    """Mixes patches, then channels."""

    def __init__(self, patches: int, width: int) -> None:
        """Two perceptrons with norms before them."""
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.patches = _perceptron(patches, 2 * patches)
        self.channels = _perceptron(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, patches, width] to the same."""
        x = x + self.patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


class Patches(nn.Module):
    """Cuts images into patches."""

    def __init__(self, size: int, width: int) -> None:
        """Patches of ``size`` pixels on each side."""
        super().__init__()
        self.convolution = nn.Conv2d(3, width, size, stride=size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 3, height, width] to [batch, patches, width]."""
        return self.convolution(x).flatten(2).transpose(1, 2)


def _perceptron(width: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


def mixer(
    *, layers: int = 6, batch: int = 8, size: int = 96, width: int = 256
) -> MadeWithLoss:
    """An MLP-Mixer."""
    patches = (size // 8) ** 2
    model = nn.Sequential(
        Patches(8, width),
        *(Mixer(patches, width) for _ in range(layers)),
        nn.LayerNorm(width),
        nn.Flatten(),
        nn.Linear(patches * width, 10),
    )
    return model, _classified(batch, size, 10), class_loss


def _classified(batch: int, size: int, classes: int = 100) -> Any:
    return torch.randn(batch, 3, size, size)


def class_loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Cross entropy with classes that go round."""
    labels = torch.arange(output.shape[0], device=output.device) % output.shape[1]
    return functional.cross_entropy(output, labels)


# -- generators ----------------------------------------------------------------------


def vae(*, batch: int = 2, size: int = 64) -> MadeWithLoss:
    """The autoencoder of latent diffusion (diffusers)."""
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 64, 128),
        layers_per_block=2,
        sample_size=size,
    )
    inputs = {"sample": torch.randn(batch, 3, size, size), "sample_posterior": True}
    return model, inputs, sample_loss


def dit(*, layers: int = 6, batch: int = 8, size: int = 32) -> MadeWithLoss:
    """A transformer for diffusion, told its step and class by its norms (diffusers)."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=64,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        sample_size=size,
        num_embeds_ada_norm=100,
    )
    inputs = {
        "hidden_states": torch.randn(batch, 4, size, size),
        "timestep": torch.full((batch,), 500),
        "class_labels": torch.arange(batch),
    }
    return model, inputs, sample_loss


def sample_loss(output: Any, batch: Batch) -> torch.Tensor:
    """Compare a sample with what went in."""
    first = next(iter(batch.values()))
    return functional.mse_loss(output.sample, first)


def gan(*, batch: int = 16, width: int = 32) -> MadeWithLoss:
    """A generator of transposed convolutions, and what it must fool."""
    up = [8 * width, 4 * width, 2 * width, width]
    layers: list[nn.Module] = [nn.ConvTranspose2d(100, up[0], 4), nn.ReLU()]
    for channels, fewer in pairwise(up):
        layers += [
            nn.ConvTranspose2d(channels, fewer, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(fewer),
            nn.ReLU(inplace=True),
        ]
    layers += [nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1), nn.Tanh()]
    channels = 3
    for more in reversed(up):
        spectral = nn.utils.parametrizations.spectral_norm
        layers += [
            spectral(nn.Conv2d(channels, more, 4, stride=2, padding=1)),
            nn.LeakyReLU(0.2, inplace=True),
        ]
        channels = more
    model = nn.Sequential(*layers, nn.Conv2d(channels, 1, 4), nn.Flatten(0))
    return model, torch.randn(batch, 100, 1, 1), fooled_loss


def fooled_loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """All are to be taken for real."""
    real = torch.ones_like(output)
    return functional.binary_cross_entropy_with_logits(output, real)


# -- sequences, graphs, policies -----------------------------------------------------


class Recurrent(nn.Module):
    """A language model on ``nn.LSTM`` or ``nn.GRU``."""

    def __init__(self, kind: type[nn.RNNBase], vocab: int, width: int) -> None:
        """Three layers, with dropout between them."""
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.cells = kind(width, width, num_layers=3, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of predicting every token from those before it."""
        hidden, _ = self.cells(self.embed(input_ids))
        logits = self.head(hidden[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def lstm(*, batch: int = 16, length: int = 64, width: int = 256) -> Made:
    """Long short-term memory, as one kernel."""
    return Recurrent(nn.LSTM, 2000, width), tokens(2000, batch, length)


def gru(*, batch: int = 16, length: int = 64, width: int = 256) -> Made:
    """Gated recurrent units, as one kernel."""
    return Recurrent(nn.GRU, 2000, width), tokens(2000, batch, length)


class Policy(nn.Module):
    """Acts on what it sees and remembers."""

    def __init__(self, width: int, actions: int) -> None:
        """Encoder, memory, and heads for actions and values."""
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.Tanh())
        self.memory = nn.LSTMCell(width, width)
        self.actor = nn.Linear(width, actions)
        self.critic = nn.Linear(width, 1)

    def forward(self, seen: torch.Tensor, done: torch.Tensor) -> Any:
        """[time, batch, 64] to logits and values; memory is cleared where done."""
        shape = seen.shape[1], self.memory.hidden_size
        h, c = seen.new_zeros(shape), seen.new_zeros(shape)
        logits, values = [], []
        for now, ended in zip(seen, done, strict=True):
            keep = (~ended).to(h.dtype).unsqueeze(1)
            h, c = self.memory(self.encoder(now), (h * keep, c * keep))
            logits.append(self.actor(h))
            values.append(self.critic(h).squeeze(1))
        return torch.stack(logits), torch.stack(values)


def policy(*, steps: int = 64, batch: int = 128, width: int = 256) -> MadeWithLoss:
    """A recurrent policy over a rollout."""
    seen = torch.randn(steps, batch, 64)
    batch_ = {"seen": seen, "done": torch.zeros(steps, batch, dtype=torch.bool)}
    return Policy(width, 18), batch_, policy_loss


def policy_loss(output: Any, batch: Batch) -> torch.Tensor:
    """Advantage actor-critic, with an entropy bonus; rewards are what was seen."""
    logits, values = output
    returns = batch["seen"].mean(-1)
    chosen = functional.log_softmax(logits, -1)
    advantage = (returns - values).detach()
    entropy = -(chosen.exp() * chosen).sum(-1)
    gained = chosen[..., 0] * advantage + 0.01 * entropy
    return functional.mse_loss(values, returns) - gained.mean()


class Convolution(nn.Module):
    """Sends messages along the edges of a graph."""

    def __init__(self, width: int) -> None:
        """One perceptron for messages, one for nodes."""
        super().__init__()
        self.message = _perceptron(2 * width, width)
        self.norm = nn.LayerNorm(2 * width)
        self.update = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """[nodes, width] and [2, edges] to [nodes, width]."""
        source, target = edges
        sent = self.message(torch.cat([x[source], x[target]], 1))
        sums = x.new_zeros(x.shape[0], sent.shape[1]).index_add(0, target, sent)
        index = target.unsqueeze(1).expand_as(sent)
        most = torch.zeros_like(sums).scatter_reduce(0, index, sent, "amax")
        return x + torch.relu(self.update(self.norm(sums + most)))


class GraphNetwork(nn.Module):
    """Convolutions, then the mean over every graph."""

    def __init__(self, layers: int, width: int) -> None:
        """An embedding of 100 kinds of nodes, and a head."""
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.layers = nn.ModuleList(Convolution(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(
        self, kinds: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor
    ) -> torch.Tensor:
        """One number for each graph."""
        x = self.embed(kinds)
        for layer in self.layers:
            x = layer(x, edges)
        sums = x.new_zeros(32, x.shape[1]).index_add(0, graph, x)
        return self.head(sums).squeeze(1)


def graphs(
    *, layers: int = 5, nodes: int = 2048, edges: int = 8192, width: int = 128
) -> MadeWithLoss:
    """A graph network with gathers and scatters."""
    return (
        GraphNetwork(layers, width),
        {
            "kinds": torch.randint(100, (nodes,)),
            "edges": torch.randint(nodes, (2, edges)),
            "graph": torch.arange(nodes) % 32,
        },
        square_loss,
    )


def square_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Everything is to become zero."""
    del batch
    return output.square().mean()


def whisper(*, layers: int = 3, batch: int = 2) -> Made:
    """Speech to text: convolutions, an encoder and a decoder."""
    config = transformers.WhisperConfig(
        encoder_layers=layers,
        decoder_layers=layers,
        d_model=256,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        max_source_positions=300,
        max_target_positions=128,
        vocab_size=4000,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        use_cache=False,
    )
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(batch, 80, 600),
        "labels": torch.randint(4000, (batch, 96)),
    }


def wav2vec2(*, layers: int = 4, batch: int = 2) -> Made:
    """Speech: seven convolutions over samples, then an encoder with layer drop off."""
    config = transformers.Wav2Vec2Config(
        num_hidden_layers=layers,
        hidden_size=256,
        intermediate_size=1024,
        num_attention_heads=8,
        conv_dim=(128,) * 7,
        layerdrop=0.0,
        mask_time_prob=0.0,
        num_labels=10,
    )
    return transformers.Wav2Vec2ForSequenceClassification(config), {
        "input_values": torch.randn(batch, 16000),
        "labels": torch.randint(10, (batch,)),
    }


def timeseries(*, layers: int = 3, batch: int = 16) -> Made:
    """A transformer that forecasts from patches of many series."""
    config = transformers.PatchTSTConfig(
        num_input_channels=7,
        context_length=256,
        patch_length=16,
        patch_stride=8,
        d_model=128,
        ffn_dim=256,
        num_attention_heads=8,
        num_hidden_layers=layers,
        prediction_length=48,
    )
    return transformers.PatchTSTForPrediction(config), {
        "past_values": torch.randn(batch, 256, 7),
        "future_values": torch.randn(batch, 48, 7),
    }
