"""Conversations: reading messages (`messages.py`), the chat template (`template.py`), tokens and loss (`chat.py`)."""
