"""Fine-tuning of language models: what Hugging Face models need beside an ordinary `sordino.Private`."""
