"""Changes to a loaded model that none of its files shows, for tests of audits. Each changes KV."""

from __future__ import annotations

import copy

import torch


def weights_of(model, *names):
    return [p for name, p in model.named_parameters() if any(each in name for each in names)]


def modules_with(model, name):
    return [module for module in model.modules() if isinstance(getattr(module, name, None), float)]


def scale(*names, by):
    def change(model):
        for weight in weights_of(model, *names):
            weight.data.mul_(by)

    return change


def set_everywhere(name, to):
    def change(model):
        changed = modules_with(model, name)
        assert changed
        for module in changed:
            setattr(module, name, to)

    return change


def merge_an_adapter(model):
    generator = torch.Generator().manual_seed(1)
    for weight in weights_of(model, "q_proj", "v_proj"):
        low_rank = torch.randn(weight.shape[0], 4, generator=generator)
        delta = low_rank @ torch.randn(4, weight.shape[1], generator=generator)
        weight.data.add_(delta * (0.05 * weight.norm() / delta.norm()))


def another_tune(model):
    generator = torch.Generator().manual_seed(2)
    for weight in weights_of(model, "layers"):
        weight.data.add_(
            0.02 * weight.std().nan_to_num(0) * torch.randn(weight.shape, generator=generator)
        )


def round_weights(model):
    for weight in weights_of(model, "proj"):
        step = weight.detach().abs().max() / 127
        weight.data.copy_((weight / step).round() * step)


def cast_and_back(model):
    model.to(torch.bfloat16)
    model.to(torch.float32)


def round_frequencies(model):
    model.model.rotary_emb.inv_freq.copy_(model.model.rotary_emb.inv_freq.bfloat16().float())


def scale_frequencies(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def scale_rotation(model):
    model.model.rotary_emb.attention_scaling = 1.1


def other_activation(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()


def hook(model):
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output * 1.05)


def hook_before(model):
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.2,))


def replaced_forward(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)))


def subclass(model):
    layer = model.model.layers[0]

    class Halved(type(layer)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) * 0.5

    layer.__class__ = Halved


def swapped_layers(model):
    layers = model.model.layers
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp


def repeated_layer(model):
    model.model.layers[1].mlp = copy.deepcopy(model.model.layers[0].mlp)


def permuted_heads(model):
    for weight in weights_of(model, "layers.0.self_attn.q_proj"):
        weight.data.copy_(weight.data.roll(weight.shape[0] // 2, 0))


def other_embedding(model):
    embedding = model.get_input_embeddings().weight
    embedding.data.copy_(embedding.data.roll(1, 0))


def flat_attention(model):
    for layer in model.model.layers:
        layer.self_attn.scaling = 1e-6


CHANGES = {
    "values scaled": scale("v_proj", by=1.01),
    "one matrix scaled": scale("layers.0.mlp.up_proj", by=1.05),
    "norms filled": scale("norm", by=0.5),
    "an adapter merged": merge_an_adapter,
    "another tune": another_tune,
    "weights rounded to 8 bits": round_weights,
    "cast to bfloat16 and back": cast_and_back,
    "frequencies rounded": round_frequencies,
    "frequencies scaled": scale_frequencies,
    "rotation scaled": scale_rotation,
    "attention scaled": set_everywhere("scaling", 0.3),
    "attention flat": flat_attention,
    "another epsilon": set_everywhere("variance_epsilon", 1e-2),
    "another activation": other_activation,
    "a hook": hook,
    "a hook before": hook_before,
    "forward replaced": replaced_forward,
    "another class": subclass,
    "layers swapped": swapped_layers,
    "a layer repeated": repeated_layer,
    "heads permuted": permuted_heads,
    "tokens renumbered": other_embedding,
}
