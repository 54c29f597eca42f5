"""An instrument of another make: every op of every module, cloned at once, told apart by a stack of open modules."""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Reference(TorchFunctionMode):
    """Around a whole run. ``seen``: module path -> list of (function, output as clones)."""

    def __init__(self, model):
        super().__init__()
        self.seen = {}
        self.functions = {}
        self._stack = []
        self._handles = []
        self._names = {}
        for path, module in model.named_modules():
            self._names.setdefault(module, path)

    def __enter__(self):
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._push))
            self._handles.append(module.register_forward_hook(self._pop, always_call=True))
        return super().__enter__()

    def __exit__(self, *exc):
        for handle in self._handles:
            handle.remove()
        return super().__exit__(*exc)

    def _push(self, module, args):
        self._stack.append(self._names[module])

    def _pop(self, module, args, output):
        self._stack.pop()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        value = args[0] if name == "__setitem__" else output
        tensors = [one for one in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(one, Tensor)]
        is_fact = name in ("__get__", "requires_grad_", "retain_grad") and getattr(func, "__self__", None) not in (
            torch.Tensor.T, torch.Tensor.mT, torch.Tensor.data, torch.Tensor.real, torch.Tensor.imag, torch.Tensor.H,
        )  # fmt: skip
        if tensors and self._stack and not is_fact and torch._C._functorch.maybe_current_level() is None:
            with torch.no_grad():
                self.seen.setdefault(self._stack[-1], []).append([one.detach().clone() for one in tensors])
            self.functions.setdefault(self._stack[-1], []).append(name)
        return output
