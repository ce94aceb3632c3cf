"""The values of `events.kind`, and the meaning of the other columns for each.

>>> EVENT_KINDS["near overflow"]
'output of a module within a factor of 2 of the largest finite number; value: its largest magnitude; limit: that number'
"""

OF_ZERO = " of 0"
"""The end of `op` of a `non-finite operator` that takes a logarithm of 0, or one over its root: no finite number is so
large that its logarithm overflows."""
BY_ZERO = " by 0"
"""Likewise of one that divides by 0."""
NONFINITE_CONSTANT = "non-finite "
"""The start of `op` where not the operator made the number: an argument without a gradient, such as a target, was not
finite itself."""
EVENT_KINDS: dict[str, str] = {
    "started": "a process began to watch; value: when, seconds since 1970",
    "resumed": "a process went on with the run; step: its first; value: the steps that the optimizer counts",
    "skipped": "the scaler found a non-finite gradient; name: the first of them in backward",
    "non-finite": "gradients are not finite and no scaler skipped the step; name: the first of them in backward",
    "phase change": "something about the watching changed",
    "warning": "something could not be recorded",
    "evaluated": "held-out results",
    "audited": "a forward audit was made in another mode than training; detail: in which",
    "ended": "the run ended",
    "calls": "the loop's calls from the end of one step to the end of the next, in order and joined by spaces, where "
    "they are other than in the step before: backward, scale, unscale_, clip, norm (a clip with an infinite "
    "threshold), scaler.step, optimizer.step (outside of scaler.step), update, get_scale, scheduler, zero_grad; `:1` "
    "behind one is the number of its optimizer, behind clip and norm of the one whose gradients were read, if known",
    "non-finite output": "the first module, in forward order, with a non-finite output in the step; op: "
    "its class; value: largest magnitude of its input; limit: largest finite number of dtype; count: modules with such "
    "an output; detail: `input` where its input was not finite either, `data` where the model's own was not, `weights` "
    "where its weights were not; op `loss` and no name where all outputs were finite and the loss was not: dtype is "
    "what it was computed in",
    "non-finite operator": "the operator that made the loss of a step non-finite from finite numbers, in the loss, or "
    "with detail `module` in the module of that name; value: largest magnitude of its inputs; limit: largest finite "
    "number of dtype; op `non-finite target of mse_loss` where such an argument was not finite itself, and float16 is "
    "dtype if it was rounded to that",
    "weights broken within step": "the weights of a module were not finite in a forward, although the loss of an "
    "earlier backward of the same step, before any optimizer step, was finite",
    "vanished gradient": "the float16 output gradient of a module was all zeros, and in FP32 it would not be; op: the "
    "operator whose result became zero; value: the largest magnitude of that result in FP32",
    "abandoned forward": "the output of the model was not finite, and no backward followed; name: the first module "
    "with such an output; op: its class",
    "near overflow": "output of a module within a factor of 2 of the largest finite number; value: its largest "
    "magnitude; limit: that number",
    "input overflow": "a product that the loop computes outside of the model overflows dtype from finite factors; "
    "value: infinite results",
    "inner overflow": "a product, sum or norm of finite numbers overflowed dtype in the first step; name: the module; "
    "value: how many of its results are infinite",
    "converted weights": "the program converted parameters to dtype before this step; name: the first; count: how many",
    "clipped by value": "`clip_grad_value_` was called",
    "leaf loss": "backward starts from a tensor that nothing was computed from: a loss that was wrapped anew",
    "dead operator": "an operator next to the loss passes no gradient: all its arguments are where it is flat; op: its "
    "name",
    "narrow input": "the model was given values in dtype in a step whose loss was not finite",
    "other forward": "a module returned dtype in a forward without gradients and float32 in the one with them; detail "
    "`training`: the other way round",
    "ratio": "a loss takes the exponential of a difference of float32 values of which one part has a gradient; value: "
    "how many",
    "failed call": "a call of the scaler raised an exception, which the program may have caught; detail: the exception",
    "failed in": "the module that was at work when an exception ended the run; op: the function; phase: `backward` "
    "where a custom autograd function recomputed the module",
    "eps lost": "a constant that keeps a divisor off zero rounds to 0 in dtype; value: the constant; limit: the "
    "largest number that rounds to 0",
    "lost factor": "a factor that is zero in dtype, or leaves nothing of what it multiplies, and would not in FP32; "
    "value: how many",
    "constant overflow": "a finite constant is infinite in dtype; value: the constant; limit: largest finite number",
    "masked rows": "rows of scores that a mask made -inf throughout, before a softmax over them; value: how many; op "
    "and name: the operator and its module, where they are known",
    "wide product": "a module that multiplied matrices in FP32 inside of an autocast region, in the first step; value: "
    "its share of all such multiplications",
    "nothing cast": "no operator of the first step had a result in 16 bits, although autocast was on; name: the "
    "module that computes most outside of any region; count: how many do",
    "narrow classes": "a logarithm of a softmax in dtype; value: the number of classes",
    "coarse logits": "a logarithm of a softmax over logits that were rounded to dtype; value: the largest of most "
    "rows; limit: the largest number below which dtype has all integers",
    "coarse predictions": "predictions that were rounded to dtype, in a loss; value: the spacing of dtype at the "
    "targets' mean over their standard deviation; limit: the ratio from which that is reported",
    "graphless cast": "a product with a copy in dtype of a trained weight, name, without a graph",
    "narrow ratio": "the exponential of a difference of two log-probabilities, one of them without a gradient, in the "
    "loss, of which either was of dtype; value: the number of ratios",
    "rounded probabilities": "a binary cross-entropy, or a logarithm of 1 - p, of probabilities that were rounded to "
    "dtype; value: the logit from which a probability rounds to 1",
    "narrow router": "a choice among scores of dtype, as a router makes it among experts; value: rows with a tie "
    "between the last that was chosen and the next; limit: the number of scores",
    "rounded logits": "a choice among FP32 scores that were of dtype before, as of a router whose softmax alone is in "
    "FP32; value: share of rows with a tie between the last that was chosen and the next; limit: the number of scores",
    "narrow statistics": "mean or variance of a module in dtype, by which it divides; value: the number of statistics",
    "narrow distance": "twice the product of vectors, rounded to dtype, was subtracted from their squares; value: the "
    "share of the squared distances that are within a few spacings of zero",
    "narrow variance": "the mean of squares less the square of the mean, in dtype; value: share of such variances that "
    "are a few spacings of these numbers at most, or negative; limit: the share above which that is reported",
    "narrow sum": "a sum with its result in dtype; value: the number of its terms; name: its module, `loss`, or `the "
    "loop` outside of forward and loss",
    "rounded positions": "integers that dtype rounds, op `_to_copy`, or makes equal, op `arange` or `linspace`, value: "
    "how many; or angles in dtype, op `sin` or `cos`, value: the largest; limit: the largest that is exact enough; op "
    "`table`: a buffer whose neighbouring rows are equal, value: how many are; op `list`: a buffer of steadily growing "
    "numbers that was rounded to dtype, value: neighbours that are equal; op `frequencies` or `schedule`: a buffer of "
    "them; op `differences`: differences of values that were rounded to dtype before, value: the share that is below "
    "two spacings of them",
    "second moments": "an optimizer has second moments in dtype, or had between two steps; name: the first one's "
    "parameter; value: the share that is zero beside a first moment that is not; limit: 1 - beta2; detail: `restored` "
    "where the optimizer's state was loaded",
    "banned op": "an operator that autocast on CUDA refuses; op: its name",
    "threaded forward": "a module was run by another thread, without the autocast of the main one",
    "recomputed": "a module was recomputed during backward in another dtype; dtype: the new; detail: the old",
    "input step": "the model was given an input that was moved along its own gradient of a scaled loss, without a call "
    "of `get_scale` in between; value: the size of the step over that of the input; limit: the ratio from which that "
    "is reported",
    "autocast changed": "autocast was another after the model's forward than before; value: 1 for on, 0 for off",
    "autocast in backward": "backward was called inside of an autocast region of dtype",
    "autocast elsewhere": "the first steps used autocast for another device type than the model's; name: that type; "
    "detail: `disabled` where the region was made before watching, and was disabled by torch or by the program; `off` "
    "where all regions are for the model's type, and the program disabled them, dtype the one that they name",
    "stale cache": "a step began in an autocast region of dtype, with its cache, in which an optimizer had stepped "
    "before; name: the optimizer's class",
    "unscaled backward": "backward reached parameters of an optimizer on a path that no scaler multiplied; name: "
    "`torch.autograd.grad` where the loop added unscaled gradients from it to scaled ones; optimizer: its number; "
    "dtype: `float16` where gradients of backward pass operators in it",
    "scaled step": "an optimizer stepped outside of `scaler.step` with gradients of a scaled loss alone; optimizer: "
    "its number",
    "clipped scaled": "the loop's own code reduced gradients to a limit before they were unscaled; count: tensors; "
    "optimizer: its number; detail: `own scale` where there is no scaler and the loop divides by its own constant, "
    "value",
    "scale not undone": "a loop without a GradScaler multiplied its loss by value; detail: `kept` where gradients were "
    "still scaled at the optimizer's step, `clipped` where they were clipped before that too, `some` where count of "
    "them were, `twice` where they were divided twice, "
    "`multiplied` where they were multiplied once more, `mixed` where micro-batches of a step had different scales, "
    "`nonfinite` where it stepped after an overflow, in count of limit steps, `replaced` where it made infinities "
    "finite",
    "unscaled twice": "the loop's own code divided gradients by the loss scale, and `scaler.step` or `unscale_` does "
    "so again; count: steps; optimizer: its number",
    "added unscaled": "the loop's own code added something to scaled gradients that is tiny beside them; count: "
    "tensors; optimizer: its number",
    "made finite": "the loop's own code made scaled gradients finite that were not; count: steps; limit: steps that "
    "were compared; optimizer: its number",
    "half backward": "the first backward without a scaler computes gradients in dtype",
    "scaled twice": "`scaler.scale` was called with what it had returned, or with a loss multiplied by what "
    "`get_scale` had returned",
    "cleared by hand": "the loop cleared gradients itself between two backwards of a step, without `zero_grad`",
    "own loss scale": "the loss was multiplied by a constant before backward, without a scaler; value: the constant",
    "anomaly mode": "backward was called in anomaly mode",
    "loss dtype": "the loss that backward started from is of dtype; detail: `computed` where it was computed in dtype "
    "and then scaled or cast to a wider one",
    "create_graph": "gradients to be differentiated again; value: 1 where they were multiplied by the loss scale and "
    "the scale was not read, else 0",
    "logged scaled": "the loop logged name multiplied by the loss scale; value: logged over true; limit: the scale",
    "scheduled metric": "`ReduceLROnPlateau` got value as its metric; step: the step before",
    "half rate": "an optimizer holds its learning rate as a tensor of dtype; name: its class; count: how often it was "
    "written between steps; value: how often it changed",
    "missing gradients": "parameters in an optimizer without a gradient; name: the first; count: of limit parameters; "
    "detail: `no_grad` where the model ran without gradients in the same autocast region before",
    "kept gradients": "gradients that an optimizer had used were still there when backward added to them, in each of "
    "the first count steps; name: one of them; detail: `now and then` where they were cleared between such steps, "
    "`skipped` where they were not finite and the scaler skipped count steps with them",
    "branch": "another set of parameters than in the step before has gradients; name: what the set is called",
    "unmoved weights": "elements of a weight with a gradient that the step left as they were, of an optimizer whose "
    "updates are not in the table `updates`; value: their share, of the larger half of the elements",
    "overwritten weights": "FP32 weights that an optimizer updates were, before the next step, replaced by their own "
    "values rounded to dtype; name: the largest such weight; step: the last; count: how often, of limit comparisons; "
    "value: what was lost of the weights, over the updates of the steps before; detail: `others` where they are other "
    "values that dtype represents exactly",
    "uncopied masters": "weights of the model that are as at the start, bit for bit, although backward gives them "
    "gradients and the FP32 masters that an optimizer steps in their place have changed; name: the largest of count "
    "weights; limit: how many were compared; value: share of its elements whose masters round to other values; the "
    "last of these events tells all",
    "decay by hand": "the loop, or an optimizer of its own, multiplied 16-bit weights by a number below 1; name: the "
    "largest of count weights; limit: by how much below 1; value: the share of that which rounding discarded; detail: "
    "`gradients` where it added that multiple of the weights to their gradients instead",
    "update by hand": "the loop added something else to 16-bit weights between steps; name: the largest of count "
    "weights; value: the share that rounding discarded",
    "rounded decay": "the loop, or an optimizer of its own, multiplied 16-bit tensors that are not weights by a number "
    "that rounds to 1; limit: by how much below 1; name: the largest of count tensors, if known; detail: its name in "
    "the optimizer's state; phase: `forward` of a buffer that forward multiplied",
    "rounded factors": "a module multiplies by the same factors in dtype many times in one step; value: the share of "
    "them that are 1 although they were computed as less; limit: the share above which that is reported",
    "slow state": "a module multiplies a state in dtype many times in one step by a number just below 1; value: by how "
    "much below 1; limit: the largest such amount that rounding makes wrong by a quarter on average",
    "statistics": "running statistics that are not finite; name: the buffer",
    "quantized layers": "linear layers whose operands were cast to 8 or 4 bits in the first sampled step that had any; "
    "name: the layer that was called last; detail: the one that takes the model's input, if one does; value: their "
    "share of the weights of all linear layers; count: of limit layers",
    "empty amax history": "at the first step, delayed scaling has no amax of earlier ones; name: the first module; "
    "count: modules",
    "not quantized": "a linear layer beside quantized ones whose operands were not; op: its class; value: its share of "
    "the weights of all linear layers; count: rows of its input; detail: `sizes` where one is no multiple of 16, `not "
    "called` where its forward did not run",
    "quantized edge": "the layer that takes the model's input, detail `first`, or gives its output, `last`, is "
    "quantized; op: its class",
    "half buffer": "a 16-bit buffer of dtype that training adds to; or a running sum that the loop keeps",
}
"""Values of `events.kind`, and the meaning of the other columns for each."""
