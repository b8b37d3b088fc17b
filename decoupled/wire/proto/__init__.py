"""Generated from the `.proto` files beside it (`decoupled.wire.generate`)."""
