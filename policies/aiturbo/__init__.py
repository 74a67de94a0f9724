"""AITurbo's unified allocation step (Zhao et al., HPDC 2021)."""
