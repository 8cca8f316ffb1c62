"""Other libraries on our kernels."""

from cudnn.integrations import transformers as transformers
