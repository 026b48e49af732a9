"""Networks written for torchsparse."""
