"""Fine-tuning of language models: what Hugging Face models need in addition to an ordinary `sordino.Private`."""
