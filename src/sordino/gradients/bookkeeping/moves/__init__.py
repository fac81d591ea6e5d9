"""Where each of torch's functions takes the examples: one rule per kind of function, with the function's own signature.

A rule is given the places of the arguments, the result, and the arguments. It answers with the place of the result or
raises `Lost`. It must be right for any values: a result's entry may depend on its own example's entries alone. What has
no rule here is lost, and then proven by backward passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.bookkeeping.following import Rule
from sordino.gradients.bookkeeping.moves import contractions, dimensions, entries, lookups, shapes
from sordino.gradients.bookkeeping.moves.tools import keep

KINDS: dict[Rule, str] = {
    entries.elementwise: """
        add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power maximum
        minimum fmax fmin atan2 arctan2 hypot logaddexp logaddexp2 where masked_fill lerp addcmul addcdiv clamp clip
        clamp_min clamp_max copysign xlogy heaviside eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and
        bitwise_or bitwise_xor isclose nextafter ldexp __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__
        __rtruediv__ __rdiv__ __div__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __and__ __or__
        __xor__ __rand__ __ror__ __rxor__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ greater less greater_equal
        less_equal not_equal complex polar __iadd__ __isub__ __imul__ __itruediv__ __ipow__ __iand__ __ior__
        copy_ fill_ zero_ threshold""",
    entries.first_alone: """
        abs absolute neg negative sign sgn sqrt rsqrt square exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos
        atan sinh cosh tanh asinh acosh atanh sigmoid logit erf erfc erfinv lgamma digamma relu relu6 leaky_relu elu
        selu celu gelu silu mish hardswish hardsigmoid hardtanh hardshrink softshrink tanhshrink softplus softsign
        logsigmoid rrelu prelu dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d
        floor ceil round trunc frac reciprocal nan_to_num isnan isinf isfinite isneginf isposinf logical_not bitwise_not
        __neg__ __pos__ __abs__ __invert__ clone contiguous detach type float double half bfloat16 int long
        short bool cpu cuda requires_grad_ conj conj_physical resolve_conj resolve_neg angle sinc i0 positive
        bernoulli zeros_like ones_like full_like rand_like randn_like empty_like tril triu expit log_ndtr ndtr ndtri
        native_dropout deg2rad rad2deg""",
    entries.cast: "to type_as",
    entries.loss_by_entry: """
        mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
        poisson_nll_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss""",
    entries.gaussian: "gaussian_nll_loss",
    entries.classification: "cross_entropy nll_loss cross_entropy_loss",
    entries.by_rows: """
        multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss triplet_margin_loss
        cosine_embedding_loss""",
    dimensions.along: "softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp glu",
    dimensions.ordered: "sort argsort",
    dimensions.topk: "topk",
    dimensions.roll: "roll",
    dimensions.pairwise_or_along: "max min",
    dimensions.reduction: """
        sum nansum mean nanmean amax amin argmax argmin prod any all median nanmedian mode logsumexp var std
        var_mean std_mean count_nonzero""",
    dimensions.reduction_after: "norm vector_norm kthvalue",
    dimensions.cosine: "cosine_similarity",
    dimensions.pairwise_distance: "pairwise_distance",
    dimensions.normalize: "normalize",
    dimensions.layer_norm: "layer_norm rms_norm",
    dimensions.rows_alone: "group_norm instance_norm local_response_norm channel_shuffle affine_grid",
    dimensions.channels_last(1): "conv1d conv_transpose1d",
    dimensions.channels_last(2): "conv2d conv_transpose2d",
    dimensions.channels_last(3): "conv3d conv_transpose3d",
    dimensions.pooling(1): """
        max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d lp_pool1d max_pool1d_with_indices
        adaptive_max_pool1d_with_indices""",
    dimensions.pooling(2): """
        max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d lp_pool2d max_pool2d_with_indices
        adaptive_max_pool2d_with_indices fractional_max_pool2d""",
    dimensions.pooling(3): """
        max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d lp_pool3d max_pool3d_with_indices
        adaptive_max_pool3d_with_indices""",
    dimensions.resample: "interpolate upsample grid_sample fold",
    dimensions.pixels: "pixel_shuffle pixel_unshuffle",
    dimensions.flip: "flip",
    dimensions.fill_along: "index_fill",
    dimensions.gumbel: "gumbel_softmax",
    dimensions.pad: "pad",
    shapes.reshape: """
        view reshape flatten unflatten squeeze unsqueeze view_as reshape_as ravel""",
    shapes.transpose: "transpose swapaxes swapdims",
    shapes.last_two: "t adjoint",
    shapes.permute: "permute",
    shapes.movedim: "movedim moveaxis",
    shapes.expand: "expand expand_as broadcast_to",
    shapes.repeat: "repeat tile",
    shapes.repeat_interleave: "repeat_interleave",
    shapes.cut: "chunk split tensor_split split_with_sizes",
    shapes.narrow: "narrow",
    shapes.drop: "select unbind",
    shapes.concatenate: "cat concat concatenate",
    shapes.stack: "stack",
    contractions.matmul: "matmul bmm mm mv __matmul__",
    contractions.add_product: "addmm baddbmm",
    contractions.linear: "linear",
    contractions.grouped: "grouped_mm _grouped_mm",
    contractions.bilinear: "bilinear",
    contractions.attention: "scaled_dot_product_attention",
    contractions.einsum: "einsum",
    contractions.distances: "cdist",
    lookups.lookup: "one_hot",
    lookups.get_item: "__getitem__",
    lookups.set_item: "__setitem__",
    lookups.index_select: "index_select",
    lookups.gather: "gather",
    lookups.take_along: "take_along_dim",
    lookups.scatter: "scatter scatter_add scatter_reduce",
    lookups.index_add: "index_add",
    contractions.recurrent: "lstm gru rnn_tanh rnn_relu",
    contractions.cell: "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    contractions.multi_head_attention: "multi_head_attention_forward",
    entries.ctc: "ctc_loss",
}
"""Functions of torch, of its tensors and of torch.nn.functional by name: those of one name do the same.

None of them calls a function of the user's, as triplet_margin_with_distance_loss does: no mode sees what that does.
"""

IN_PLACE = (
    entries.elementwise,
    entries.first_alone,
    lookups.scatter,
    lookups.index_add,
    contractions.add_product,
    dimensions.fill_along,
)
"""Kinds of functions whose namesakes with an underscore do the same to their first argument."""

PROPERTIES: dict[str, Rule] = {
    **dict.fromkeys(("T", "H"), shapes.reverse),
    **dict.fromkeys(("mT", "mH"), shapes.last_two),
    **dict.fromkeys(("data", "real", "imag"), entries.first_alone),
}

BY_THEMSELVES: dict[Any, Rule] = {
    F.embedding: lookups.lookup,
    F.embedding_bag: lookups.bags,
    F.batch_norm: dimensions.batch_norm,
    F.unfold: dimensions.resample,
    Tensor.unfold: shapes.unfold,
    torch._C._VariableFunctions._pack_padded_sequence: lookups.pack,
    torch._C._VariableFunctions._pad_packed_sequence: lookups.unpack,
    **{getattr(Tensor, name).__get__: rule for name, rule in PROPERTIES.items()},
    torch.view_as_real: lambda at, result, input: at.join([(input, keep(lambda place: True))]),
    torch.view_as_complex: lambda at, result, input: at.join(
        [(input, keep(lambda place: place.dim < input.dim() - 1))]
    ),
    **dict.fromkeys(
        (torch.fft.fft, torch.fft.ifft, torch.fft.rfft, torch.fft.irfft, torch.fft.hfft), dimensions.fourier
    ),
    **dict.fromkeys((torch.fft.fft2, torch.fft.ifft2, torch.fft.rfft2, torch.fft.irfft2), dimensions.fourier_twice),
    **dict.fromkeys((torch.fft.fftn, torch.fft.ifftn, torch.fft.rfftn, torch.fft.irfftn), dimensions.fourier_named),
}
"""Functions whose namesakes do something else, or have their arguments in another order."""

OWNERS: tuple[Any, ...] = (torch, Tensor, F, torch._C._nn, torch.special, torch.linalg)


def find_functions(names: str, in_place: bool) -> Iterable[Any]:
    """The functions of these names, wherever torch has them."""
    every = [name + mark for name in names.split() for mark in ("", "_") if not mark or in_place]
    found = (getattr(owner, name, None) for name in every for owner in OWNERS)
    return (function for function in found if callable(function))


MOVES: dict[Any, Rule] = {
    **{function: rule for rule, names in KINDS.items() for function in find_functions(names, rule in IN_PLACE)},
    **BY_THEMSELVES,
}
COMPOSED = frozenset(
    find_functions(
        f"{KINDS[contractions.recurrent]} {KINDS[contractions.cell]} {KINDS[contractions.multi_head_attention]}", False
    )
) | {F.embedding_bag}
"""Functions that are book-kept as several smaller ones, whose outputs all have the examples first."""
