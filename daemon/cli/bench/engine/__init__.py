"""What an engine's steps cost: prefill and decode beside the roofline, and where their time goes."""
