"""`TextTokenizer`: torchtitan's tokenizer, for texts. `chat/template.py` tokenises conversations, with transformers."""

from dataclasses import dataclass

from torchtitan.components.tokenizer import HuggingFaceTokenizer


class TextTokenizer(HuggingFaceTokenizer):
    """Encodes texts with torchtitan's tokenizer, and ignores the folder's chat template."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTokenizer.Config):
        """The config of torchtitan's tokenizer; its `build` returns a `TextTokenizer`."""

    def set_chat_template(self, template: str) -> None:
        """Ignore the template, since torchtitan's Jinja does not support {% generation %}, unlike transformers."""
