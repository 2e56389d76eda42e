"""Values that look like memory and cannot be read or written as such, or can and look as if they could not."""

import warnings
from typing import Any

import numpy as np


def odd_arrays() -> dict[str, Any]:
    """Those without torch."""
    released = memoryview(bytearray(8))
    released.release()
    return {
        "none": None,
        "number": 5,
        "text": "text",
        "list": [1, 2],
        "released": released,
        "broadcast": np.broadcast_to(np.zeros(1), (4,)),
        "strided": np.zeros(16)[::2],
        "objects": np.array([{}]),
        "fields": np.zeros(3, [("a", "O")]),
        "masked": np.ma.masked_array([1.0, 2.0], mask=[False, True]),
    }


def odd_tensors() -> dict[str, Any]:
    """Those of torch."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Strange(torch.Tensor):  # type: ignore[misc] # torch need not be there to be checked
        """Refuses whatever is asked of it, with an error of its own."""

        @classmethod
        def __torch_function__(cls, *arguments: Any, **named: Any) -> Any:
            raise KeyError("strange")

    freed = torch.ones(4, 4)
    turned = freed.t()
    freed.untyped_storage().resize_(0)
    with warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("ignore")
        fake, on_no_gpu = torch.empty(4, 4), torch.empty(4, 4, device="cuda")
    values = torch.arange(16.0).reshape(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "expanded": torch.zeros(4, 1).expand(4, 4),
            "overlapping": torch.as_strided(torch.zeros(8), (4, 4), (1, 1)),
            "sparse": values.to_sparse(),
            "sparse rows": values.to_sparse_csr(),
            "meta": values.to("meta"),
            "conjugated": torch.zeros(4, dtype=torch.complex64).conj(),
            "quantized": torch.quantize_per_tensor(values, 1.0, 0, torch.qint8),
            "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
            "jagged": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
            "freed": freed,
            "freed and turned": turned,
            "fake": fake,
            "on no gpu": on_no_gpu,
            "strange": torch.zeros(4, 4).as_subclass(Strange),
            "mkldnn": values.to_mkldnn(),
        }
